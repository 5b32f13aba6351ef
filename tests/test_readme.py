"""Follows the README as a new user does: its script is killed and started again, and each
command of its block is typed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support import scripts
from tests.support.commands import ckptd
from tests.support.daemons import until

README = Path(__file__).parents[1].joinpath("README.md").read_text()


@pytest.mark.promise
@pytest.mark.usefixtures("processes")
def test_a_new_user_trains_kills_and_looks_at_what_was_saved(tmp_path: Path) -> None:
    root, script, output = tmp_path / "ckpts", tmp_path / "train.py", tmp_path / "output"
    (source,) = re.findall(r"^## Use it\n\n```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    pause = "time.sleep(0.1)"
    assert pause in source
    output.touch()
    script.write_text(source.replace(pause, "time.sleep(0.01)"))
    user = {"XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    environment = {**os.environ, **user, "CKPTD_ROOT": str(root)}
    first = scripts.Script(script, environment=environment, directory=tmp_path, output=output)
    try:
        until(lambda: "<Pending step 79 of attempt 1: sealed" in output.read_text(), "step 79")
        first.kill()
        ended = scripts.run(script, environment=environment)
        assert ended.code == 0, ended.output
        lines = ended.output.splitlines()
        recovered = re.fullmatch(r"recovered step (\d+) from (memory|storage)", lines[0])
        assert recovered is not None, ended.output
        assert int(recovered[1]) >= 79
        assert lines[-1].startswith("<Pending step 199 of attempt 2: ")

        printed = {}
        # `ckptd top` needs a terminal: tests/daemon/top.
        for words in re.findall(r"^ckptd (?!top )(.*?) +#", README, re.MULTILINE):
            typed = ckptd(*words.replace("/ckpts", str(root)).split(), environment=user)
            assert typed.returncode == 0, (words, typed.stderr)
            printed[words.split()[0]] = typed.stdout
    finally:
        first.kill()
        stopped = ckptd("stop", root, environment=user)
    assert list(printed) == ["status", "ls", "show", "verify"]
    assert re.search(r"^train  2 .* step 199, ", printed["status"], re.MULTILINE)
    assert re.search(r"^train  step-0*199\.a0*2 .* newest$", printed["ls"], re.MULTILINE)
    assert printed["show"].startswith("train/step-00000199.a0002\n  step           199 of ")
    assert len(re.findall(r"^train/step-\S+: sound, ", printed["verify"], re.MULTILINE)) == len(
        printed["ls"].splitlines()
    ) - len(["heading"])
    assert stopped.returncode == 0, stopped.stderr
