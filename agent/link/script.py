"""Names the main script of this process: unnamed jobs are called after it, and
checkpoints tell who saved them.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from pathlib import Path
from typing import NamedTuple

from ckptd.agent.link.interactive import is_interactive
from ckptd.agent.link.run_facts import arguments_in, own_command
from ckptd.shared.errors import CkptdError, InvalidRequest, NotFound
from ckptd.shared.storage.locate import open_root

log = logging.getLogger("ckptd.agent")

DEFAULT = "default"
"""The name of an unnamed job in an interactive session. Earlier versions gave it to
every unnamed job.
"""


def script() -> str:
    """Return the file name of the main script, like "train.py", or the name of a module
    run by `python -m`.

    Return "" in an interactive session.
    """
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return str(spec.name).removesuffix(".__main__")
    if not file:
        return ""
    return Path(file).name if spec is None else Path(file).parent.name  # of `python DIRECTORY`


def script_path() -> str:
    """Return the absolute path of the main script, without links.

    In an interactive session, return that of the notebook if Jupyter or VS Code tells
    it, and otherwise the working directory. Return "" if there is no script, as in
    `python -c`.
    """
    main = sys.modules.get("__main__")
    place = getattr(main, "__file__", None)
    if not place and is_interactive():
        place = getattr(main, "__vsc_ipynb_file__", None) or os.environ.get("JPY_SESSION_NAME")
        place = place or "."
    try:
        return storable(os.path.realpath(str(place))) if place else ""
    except OSError:  # the working directory has been deleted
        return ""


def storable(text: str) -> str:
    """Return a text as it can be stored in a document: without what is no Unicode, and
    its last 1,024 characters.
    """
    return text.encode(errors="backslashreplace").decode()[-1024:]


def look_for_other_script(root: str, job: str) -> threading.Thread:
    """Log one sentence if the newest checkpoint of an unnamed job was saved by a script
    at another path, or with other arguments.

    Two scripts with one name, or two runs of a sweep, would otherwise meet in one job by
    accident. The look is taken on a thread of its own, which is returned: storage that
    hangs must not hold the training.
    """
    thread = threading.Thread(
        target=_look_for_other_script, args=(root, job), name="ckptd-script", daemon=True
    )
    thread.start()
    return thread


def _look_for_other_script(root: str, job: str) -> None:
    if other := _other_run(root, job):
        log.warning(
            "job %r has its name from the main script, and its newest checkpoint was saved %s. If "
            "the two do not train the same thing, set CKPTD_JOB or job= to another name for one of "
            "them",
            job,
            other.told,
        )


class _OtherRun(NamedTuple):
    """A run that has saved the newest checkpoint of an unnamed job, and differs from
    this one.

    told: the difference in words. arguments: True if the arguments differ.
    """

    told: str
    arguments: bool


def _other_run(root: str, job: str) -> _OtherRun | None:
    """Return the other run, or None if the newest checkpoint was saved by a run like
    this one, or if it is not known which run has saved it.
    """
    repository = open_root(root)
    try:
        newest = repository.read_newest(job)
        writer = repository.read_manifest(job, newest).writer if newest else {}
    except (CkptdError, OSError) as error:
        log.debug("who saved job %s is not known: %s", job, error)
        return None
    paths, commands = (writer.get("path", ""), script_path()), (writer.get("command", ""), "")
    if not is_interactive():  # the command line of a kernel differs at each start
        commands = commands[0], own_command()
    other_path = all(paths) and paths[0] != paths[1]
    other_arguments = all(commands) and arguments_in(commands[0]) != arguments_in(commands[1])
    if not other_path and not other_arguments:
        return None
    how = "by another one" if other_path else "with other arguments"
    if other_path and other_arguments:
        how += " and with other arguments"
    theirs, mine = (
        f"{command} ({path})" if other_path and other_arguments else path if other_path else command
        for path, command in zip(paths, commands, strict=True)
    )
    theirs = theirs if theirs.isprintable() else ascii(theirs)
    return _OtherRun(f"{how}: {theirs}, while this is {mine}", other_arguments)


def check_same_run(root: str, job: str) -> None:
    """Raise InvalidRequest if a main script outside of the working directory gives its
    name to a job whose newest checkpoint was saved with other arguments.

    Such a script is often a program that starts the functions of many trainings. It
    reads storage first. What torchrun starts is the training itself.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or is_interactive() or not is_outside(script_path()):
        return
    other = _other_run(root, job)
    if other is not None and other.arguments:
        raise InvalidRequest(
            f"the main script lies outside of the working directory, and the newest checkpoint of "
            f"job {job!r}, which has its name, was saved {other.told}: set CKPTD_JOB or job= to "
            f"{job!r} to go on from that checkpoint, or to another name to begin a job"
        )


def is_outside(path: str) -> bool:
    """Return True if a path lies outside of the working directory, or in the Python
    environment inside of it.
    """
    try:
        here = Path(os.path.realpath("."))
    except OSError:  # it has been deleted
        return bool(path)
    environment = Path(os.path.realpath(sys.prefix))
    installed = environment.is_relative_to(here) and Path(path).is_relative_to(environment)
    return bool(path) and (installed or not Path(path).is_relative_to(here))


LAUNCHERS = frozenset(
    {
        "airflow",
        "celery",
        "dask",
        "default_worker.py",  # of Ray
        "distributed.cli.dask_spec",
        "distributed.cli.dask_worker",
        "horovod.runner.run_task",
        "nemo_run.core.runners.fdl_runner",
        "prefect.engine",
        "prefect.flow_engine",
        "pyspark.daemon",
        "submitit.core._submit",
    }
)
"""Main scripts and modules that start functions of any training in their own process."""


def script_job() -> str:
    """Return the name of an unnamed job: that of the main script, without its suffix
    and with "-" for what a name may not contain.

    Raises InvalidRequest if the main script is one of `LAUNCHERS`.
    """
    found = script()
    if found in LAUNCHERS:
        raise InvalidRequest(
            f"the main script is {found}, which starts the functions of any training, so that it "
            f"gives this job no name: name it with CKPTD_JOB or job=, such as CKPTD_JOB=gpt"
        )
    file = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    name = found.removesuffix(".py") if Path(file).name == found else found.rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:128] or DEFAULT


def check_not_default(root: str, job: str) -> None:
    """Raise NotFound if the root has checkpoints of job "default", which an unnamed job
    may have saved with an earlier version.
    """
    repository = open_root(root)
    if any(repository.is_committed(DEFAULT, tag) for tag in repository.tags(DEFAULT)):
        raise NotFound(
            f"job {job!r}, named after the main script, has no checkpoint, but {root} has "
            f"checkpoints of job {DEFAULT!r}: set "
            f"CKPTD_JOB={DEFAULT} to recover those, or CKPTD_JOB={job} to begin without them"
        )
