"""Draws what `ckptd top` shows of a running daemon as an SVG, for the documents.

`python -m tests.support.top_picture SOCKET FILE` asks the daemon for a while, so that there
is something to draw, and then waits until a snapshot is being saved.
"""

from __future__ import annotations

import html
import io
import re
import time
from pathlib import Path

import click
from rich.cells import cell_len
from rich.console import Console
from rich.terminal_theme import MONOKAI

from ckptd.daemon.commands.health import problems
from ckptd.daemon.commands.neighbours import daemon_status
from ckptd.daemon.top.choice import Choice
from ckptd.daemon.top.poller import Poller
from ckptd.daemon.top.screen import View, job_names, screen


def picture(view: View, columns: int, rows: int) -> str:
    """Return a screen as an SVG that loads nothing from elsewhere."""
    console = Console(
        record=True, width=columns, height=rows, file=io.StringIO(), force_terminal=True,
        color_system="truecolor", legacy_windows=False,
    )  # fmt: skip
    for line in screen(view, columns, rows):
        console.print(line, no_wrap=True, overflow="crop", highlight=False)
    drawn = console.export_svg(title="ckptd top", theme=MONOKAI, unique_id="top")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    return _RUN.sub(_placed, drawn)


_RUN = re.compile(
    r'<text (class="\S+") x="([\d.]+)" (y="[\d.]+") textLength="[\d.]+" (clip-path="\S+")>'
    r"(.*?)</text>"
)
"""A run of text of one style."""
_CELL = 12.2
"""The width of a character in rich's pictures."""


def _placed(run: re.Match[str]) -> str:
    """Return a run as one text for each part between two or more spaces: not every viewer
    keeps those at the start, or knows `textLength`.
    """
    kind, x, y, clip, content = run.groups()
    text, found = html.unescape(content).replace("\xa0", " "), []
    for part in re.finditer(r"\S+(?: \S+)*", text):
        at = float(x) + _CELL * cell_len(text[: part.start()])
        width = _CELL * cell_len(part[0])
        words = html.escape(part[0]).replace(" ", "&#160;")
        place = f'x="{at:.1f}" {y} textLength="{width:.1f}" {clip}'
        found.append(f"<text {kind} {place}>{words}</text>")
    return "".join(found)


@click.command()
@click.argument("socket", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--columns", default=100)
@click.option("--rows", default=24)
@click.option("--seconds", default=20.0)
@click.option("--job", default="")
@click.option("--ranks", is_flag=True)
def main(
    socket: Path, file: Path, columns: int, rows: int, seconds: float, job: str, ranks: bool
) -> None:
    poller = Poller(lambda: daemon_status(socket), 1.0)
    end = time.monotonic() + seconds
    while True:
        poller.ask_once()
        status = poller.seen.contact.status
        assert status is not None
        chosen = next((each for each in status["jobs"] if each["job"] == job), status["jobs"][0])
        save = next(iter(chosen["saving"]), None)
        if time.monotonic() > end and save and 3 * save["done_bytes"] > save["total_bytes"]:
            break
        time.sleep(0.05)
    found = [(problem.job, problem.message) for problem in problems(status)]
    choice = Choice(job or job_names(status)[0], ranks=ranks)
    view = View(seen=poller.seen, choice=choice, problems=found, now=time.time())
    file.write_text(picture(view, columns, rows))


if __name__ == "__main__":
    main()
