"""Names the main script of this process: unnamed jobs are called after it, and
checkpoints tell who saved them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ckptd.shared.errors import NotFound
from ckptd.shared.storage.locate import open_root

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
