"""Tests that interactive sessions are recognised, and loops that they run again: at a
prompt, in a console within a script, and in a notebook.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptd.agent import Agent
from ckptd.agent.link.interactive import InteractiveSession, is_interactive, statement
from tests.support.daemons import Daemon, Home
from tests.support.scripts import python

BEGIN = """\
import logging, torch, ckptd
logging.basicConfig(format="LOG %(message)s")
state = {"w": torch.zeros(3)}
def save(step): return ckptd.snapshot(state, step=step, metrics={"loss": 1.0}).wait("durable", 60)

"""
LOOP = "for step in range(3): print('saved', save(step).attempt, step)\n\n"
TWICE = """\
for step in (7, 7):
    try: print('saved', save(step).attempt, step)
    except Exception as error: print('error', error)

"""
END = "ckptd.close()\n"
SAVED = [f"saved {attempt} {step}" for attempt in (1, 2) for step in range(3)]


def environment(place: Home) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("CKPTD_")}
    return {**clean, "CKPTD_SOCKET": str(place.socket), "CKPTD_JOB": "gpt"}


def typed(place: Home, text: str, *command: str) -> tuple[list[str], list[str]]:
    """Type a text at a prompt. Return the lines that say what was saved, and the log."""
    if command[0].startswith("-"):
        done = subprocess.run(
            [sys.executable, *command],
            input=text,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=environment(place),
        )
    else:
        done = python(*command, typed=text, environment=environment(place))
    assert done.returncode == 0, done.stderr
    lines = f"{done.stdout}\n{done.stderr}".replace(">>> ", "").replace("... ", "").splitlines()
    return (
        [line for line in lines if line.startswith(("saved ", "error "))],
        [line for line in lines if line.startswith("LOG ")],
    )


def test_a_process_that_runs_a_script_is_no_session() -> None:
    session = InteractiveSession()
    session.took_step()
    assert (is_interactive(), statement(), session.runs_again()) == (False, None, False)


@pytest.fixture
def console(tmp_path: Path) -> Path:
    """A script that reads what is typed as a prompt does."""
    script = tmp_path / "console.py"
    script.write_text("import code; code.interact(banner='', exitmsg='')\n")
    return script


@pytest.mark.parametrize("within_a_script", [False, True])
def test_a_loop_at_a_prompt_can_be_run_again(
    daemon: Daemon, console: Path, within_a_script: bool
) -> None:
    """A step that is repeated within one statement is a mistake, and a step that follows
    continues the attempt.
    """
    command = (str(console),) if within_a_script else ("-i", "-q")
    text = BEGIN + LOOP + LOOP + TWICE + END
    saved, log = typed(daemon.home, text, *command)
    error = "error step 7 does not follow step 7, the last of attempt 2"
    assert [*saved[:7], saved[7].partition(":")[0]] == [*SAVED, "saved 2 7", error]
    (again,) = [line for line in log if "run again" in line]
    assert again.startswith(
        "LOG step 0 does not follow step 2: the loop is run again, and attempt 2 of job 'gpt' "
        "begins."
    )
    assert sorted(path.name for path in (daemon.home.root / "gpt").glob("step-*")) == sorted(
        f"step-{step:08d}.a{attempt:04d}"
        for attempt, step in [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (2, 7)]
    )


def test_a_session_that_is_killed_leaves_the_loop_that_it_ran_last(
    daemon: Daemon, console: Path
) -> None:
    """The newer attempt is recovered, although the earlier one has a later step."""
    loops = "".join(
        f"for step in range({steps}): state['w'].fill_({fill} + step); save(step)\n\n"
        for steps, fill in ((3, 10), (2, 20))
    )
    text = f"{BEGIN}{loops}import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n"
    done = python(console, typed=text, environment=environment(daemon.home))
    assert done.returncode == -signal.SIGKILL, done.stderr
    agent = Agent("gpt", socket=daemon.home.socket)
    state = {"w": torch.zeros(3)}
    recovered = agent.recover(state)
    assert recovered is not None
    assert (recovered.attempt, recovered.step, state["w"].tolist()) == (2, 1, [21.0] * 3)
    agent.close()


def test_the_same_loop_in_a_script_is_a_mistake(daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"{BEGIN}{LOOP}try: save(0)\nexcept Exception as error: print('error', error)\n"
    )
    saved, log = typed(daemon.home, "", str(script))
    assert saved[:3] == SAVED[:3]
    assert saved[3].startswith("error step 0 does not follow step 2, the last of attempt 1")
    assert [line for line in log if "run again" in line] == []


def test_a_cell_of_a_notebook_can_be_run_again(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule starts over, too: the loop is run to its end three times."""
    import nbformat
    from nbclient import NotebookClient

    for name, value in environment(daemon.home).items():
        monkeypatch.setenv(name, value)
    scheduled = (
        "schedule = ckptd.Schedule(every_seconds=1e-6)\n",
        "for step in range(3):\n"
        "    made = schedule.snapshot(state, step=step)\n"
        "    print(step, made and made.wait('durable', 60).attempt)\n",
    )
    cells = [BEGIN, LOOP, LOOP, scheduled[0], *[scheduled[1]] * 2, END]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    done = NotebookClient(book, timeout=120).execute()
    # A line may be split between two outputs.
    out = [
        "".join(each["text"] for each in cell.outputs if each.get("name") == "stdout").splitlines()
        for cell in done.cells
    ]
    assert [*out[1], *out[2]] == SAVED
    assert "attempt 2 of job 'gpt' begins" in str(done.cells[2].outputs)
    first, second = ({line.split()[-1] for line in lines} - {"None"} for lines in out[4:6])
    assert (first, second) == ({"3"}, {"4"})
