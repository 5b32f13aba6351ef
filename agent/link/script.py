"""Names the main script of this process: unnamed jobs are called after it, and checkpoints tell who saved them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

DEFAULT = "default"
"""The name of an unnamed job in an interactive session. Earlier versions gave it to every unnamed job."""


def script() -> str:
    """Return the file name of the main script, like "train.py", or the name of a module run by `python -m`.

    Return "" in an interactive session.
    """
    main = sys.modules.get("__main__")
    if (spec := getattr(main, "__spec__", None)) is not None:
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).name if file else ""


def script_job() -> str:
    """Return the name of an unnamed job: that of the main script, without its suffix and with "-" for what a name may not contain."""
    name = script().removesuffix(".py").rpartition(".")[2]
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:128] or DEFAULT
