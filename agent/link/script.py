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

from ckptd.agent.link.interactive import is_interactive
from ckptd.shared.errors import CkptdError, NotFound
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
    """Log one sentence if a script at another path has saved the newest checkpoint of
    an unnamed job.

    Two scripts with one name would otherwise meet in one job by accident. The look is
    taken on a thread of its own, which is returned: storage that hangs must not hold the
    training.
    """
    thread = threading.Thread(
        target=_look_for_other_script, args=(root, job), name="ckptd-script", daemon=True
    )
    thread.start()
    return thread


def _look_for_other_script(root: str, job: str) -> None:
    repository, mine = open_root(root), script_path()
    try:
        newest = repository.read_newest(job)
        theirs = newest and repository.read_manifest(job, newest).writer.get("path")
    except (CkptdError, OSError) as error:
        log.debug("who saved job %s is not known: %s", job, error)
        return
    if theirs and mine and theirs != mine:
        log.warning(
            "job %r has its name from the main script, and its newest checkpoint was saved by "
            "another one: %s, while this is %s. If the two do not train the same thing, set "
            "CKPTD_JOB to another name for one of them",
            job,
            theirs if theirs.isprintable() else ascii(theirs),
            mine,
        )


def script_job() -> str:
    """Return the name of an unnamed job: that of the main script, without its suffix
    and with "-" for what a name may not contain.
    """
    found = script()
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
