"""Checks that the installed torch is one that ckptd works with.

`ckptd.agent` imports this module before any other. An import of this module raises
UnsupportedTorch if torch is missing or too old.
"""

from __future__ import annotations

import re

from ckptd.shared.errors import UnsupportedTorch

LOWEST = "2.8"
"""The lowest torch that ckptd works with; the extra `torch` in pyproject.toml asks for
it. Torch 2.7 has no `TCPStore.clone`.
"""


def check(version: str) -> None:
    """Raise UnsupportedTorch if this version of torch is too old.

    Every build of the lowest version passes, also a preview of it.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and tuple(map(int, found.groups())) < tuple(map(int, LOWEST.split("."))):
        raise UnsupportedTorch(
            f"ckptd works with torch {LOWEST} or newer, and torch {version} is installed: upgrade "
            f"it with pip install 'torch>={LOWEST}'"
        )


try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise UnsupportedTorch(
        f"ckptd.agent needs torch {LOWEST} or newer, and there is none: install it with pip "
        f"install 'torch>={LOWEST}'"
    ) from None
check(str(torch.__version__))
