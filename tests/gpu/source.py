"""Lets the acceptance script run from a clone in which ckptd is not installed, on a
machine that has torch and what ckptd needs. Import it first.
"""

import importlib.util
import os
import sys
from pathlib import Path

if importlib.util.find_spec("ckptd") is None:
    _source = str(Path(__file__).resolve().parents[2] / "typings")  # links to the packages
    sys.path.insert(0, _source)
    # For daemons, which are other processes.
    os.environ["PYTHONPATH"] = os.pathsep.join([_source, os.environ.get("PYTHONPATH", "")])
