"""Makes the manual pages of the `ckptd` commands.

`python -m tests.support.manual` writes them into docs/man.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

from click_man.core import write_man_pages

from ckptd.daemon.commands.cli import Verb, main
from ckptd.shared import __version__

DIRECTORY = Path(__file__).parents[2] / "docs" / "man"


def pages() -> dict[str, str]:
    """Return the text of each manual page by its file name.

    The pages have no date, so that only a changed command changes them.
    """
    whole = copy.copy(main)
    whole.commands = {
        name: command.load() if isinstance(command, Verb) else command
        for name, command in main.commands.items()
    }
    with tempfile.TemporaryDirectory() as place:
        write_man_pages("ckptd", whole, version=f"ckptd {__version__}", target_dir=place, date=" ")
        return {page.name: page.read_text() for page in Path(place).iterdir()}


if __name__ == "__main__":
    for old in DIRECTORY.iterdir():
        old.unlink()
    for name, text in pages().items():
        (DIRECTORY / name).write_text(text)
