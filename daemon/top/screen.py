"""Draws what `ckptd top` shows, as lines that fit into a window of any size.

Everything here depends on its arguments alone. All text that comes from a report is
made fit for a terminal first: names of paths and messages may hold anything.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.text import Text

from ckptd.daemon.job.stored_checkpoint import LITTLE_ROOM
from ckptd.daemon.top.choice import Choice
from ckptd.daemon.top.poller import Seen
from ckptd.daemon.top.trends import NO_TREND, Trend
from ckptd.shared.location import url_scheme
from ckptd.shared.units import count_text, printable, progress_text, size_text, span_text

_BAD, _WARN, _GOOD, _DIM, _HEAD = "bold red", "yellow", "green", "dim", "bold"
_DAY = 86_400.0
_MOST_PROBLEMS = 3
_MARKS = "   "
"""The place of the marks before the name of a job: it is chosen, something is wrong."""
_GAP = 2
"""The spaces between two columns of a table."""


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters that a terminal can show.

    spark: from the least value to the greatest. done, left: the two parts of a bar.
    more: stands at the end of a text that is cut. keys: the names of the arrows.
    """

    spark: str
    done: str
    left: str
    more: str
    keys: str


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "━", "─", "…", "↑↓")
ASCII = Glyphs("_.-=+*#@", "#", "-", "~", "Up/Down")


@dataclass(frozen=True, slots=True)
class View:
    """The content of a screen.

    seen: what is known of the daemon. problems: the job and the sentence of each thing
    that is wrong. waited: the seconds for which the last question has no answer. now: in
    Unix seconds.
    """

    seen: Seen
    choice: Choice
    problems: Sequence[tuple[str, str]] = ()
    waited: float = 0.0
    now: float = 0.0
    glyphs: Glyphs = UNICODE

    @property
    def status(self) -> Mapping[str, Any]:
        """The last report of the daemon, or an empty one."""
        return self.seen.contact.status or {"jobs": []}

    @property
    def silent(self) -> bool:
        """True if the daemon does not answer."""
        return self.seen.contact.silent(self.waited)

    @property
    def elapsed(self) -> float:
        """The seconds since the last report."""
        return max(0.0, self.now - self.seen.contact.taken)

    @property
    def job(self) -> Mapping[str, Any] | None:
        """The job that is chosen, or None."""
        jobs = (job for job in self.status["jobs"] if job["job"] == self.choice.job)
        return next(jobs, None)

    def trend(self, job: Mapping[str, Any]) -> Trend:
        """Return what the last snapshots of a job have cost."""
        return self.seen.trends.get(job["job"], NO_TREND)


def job_names(status: Mapping[str, Any]) -> list[str]:
    """Return the names of the jobs in the order of the table: those with connected ranks
    first.
    """
    return [job["job"] for job in _ordered(status)]


def screen(view: View, columns: int, rows: int) -> list[Text]:
    """Return the lines of a window: at most `rows`, none wider than `columns` cells."""
    head = _head(view, columns)[: max(rows - 2, 1)]
    foot = _foot(view, columns) if rows >= 4 else []
    room = max(rows - len(head) - len(foot), 0)
    if view.choice.ranks and view.job is not None:
        body = _ranks(view, view.job, columns, room)
    else:
        body = _jobs(view, columns, room)
    if view.silent:  # what is shown is old
        for line in body:
            line.stylize(_DIM)
    blank = [Text()] * (room - len(body))
    return [_cut(line, columns, view.glyphs) for line in (*head, *body, *blank, *foot)][:rows]


# -- the head and the foot


def _head(view: View, columns: int) -> list[Text]:
    status, seen = view.status, view.seen
    title = _both(
        f"ckptd top  {printable(str(status.get('root', '')))}",
        time.strftime("%H:%M:%S", time.localtime(view.now)),
        columns,
        view.glyphs,
    )
    lines = [Text(title, _HEAD)]
    if remark := seen.contact.remark(view.now, view.waited):
        style = _BAD if view.silent else _GOOD
        lines += [Text(line, style) for line in wrapped(remark, columns)[:2]]
    if seen.contact.status is None:
        return lines
    lines += _flow(_facts(view), columns, _DIM if view.silent else "")
    warn = _DIM if view.silent else _WARN  # the problems are those of the last report
    for _, message in view.problems[:_MOST_PROBLEMS]:
        lines.append(Text(f"! {printable(message)}", warn))
    if (more := len(view.problems) - _MOST_PROBLEMS) > 0:
        lines.append(Text(f"! {count_text(more, 'more problem')}: ckptd status --check", warn))
    return [*lines, Text()]


def _facts(view: View) -> list[str]:
    status, cpu = view.status, view.seen.cpu
    memory, counters = status["shared_memory"], status["counters"]
    free, rss = status["disk_free_bytes"], status["rss_bytes"]
    state = f"{'was ' if view.silent else ''}{'ready' if status['ready'] else 'STOPPING'}"
    facts = [
        f"{state}, up {span_text(status['uptime_seconds'])}",
        f"pid {status['pid']}",
        f"CPU {'-' if cpu is None else f'{100 * cpu:.1f} %'}",
        f"memory {'-' if rss is None else size_text(rss)}",
        f"loop {1000 * status['event_loop_lag_seconds']:.0f} ms late",
        f"shared memory {size_text(memory['used_bytes'])} of {size_text(memory['quota_bytes'])}",
    ]
    if free is not None:
        facts.append(f"{'stage' if status.get('stage') else 'disk'} {size_text(free)} free")
    elif not url_scheme(status["root"]):
        facts.append("disk NOT AVAILABLE")
    facts.append(f"{counters['sealed']} sealed, {counters['persisted']} saved")
    facts.append(f"{counters['skipped']} skipped, {counters['failed']} failed")
    if stage := status.get("stage"):
        facts.append(
            f"{count_text(stage['waiting'], 'checkpoint')} "
            f"({size_text(stage['waiting_bytes'])}) to upload"
        )
    return facts


def _foot(view: View, columns: int) -> list[Text]:
    if view.choice.ranks:
        text = f"{view.glyphs.keys} scroll   Enter jobs   q quit"
    else:
        text = f"{view.glyphs.keys} job   Enter ranks   q quit"
    return [Text(text, _DIM)]


# -- the jobs


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table of jobs.

    widths: from the narrowest that is of use to the widest. cell: words the value of a
    job for a width.
    """

    title: str
    widths: tuple[int, ...]
    cell: Callable[[View, Mapping[str, Any], int], Text]
    right: bool = False


def _jobs(view: View, columns: int, room: int) -> list[Text]:
    jobs = _ordered(view.status)
    if not jobs:
        return [Text("no jobs yet", _DIM)][:room]
    panel = [] if view.job is None else [Text(), *_panel(view, view.job, columns)]
    # The table comes first: it needs its titles, and three jobs.
    panel = panel[: max(room - 1 - min(len(jobs), 3), 0)]
    return [*_table(view, jobs, columns, room - len(panel)), *panel]


def _table(view: View, jobs: Sequence[Mapping[str, Any]], columns: int, room: int) -> list[Text]:
    """Return the table of jobs with its titles, at most `room` lines."""
    longest = max(cell_len(printable(job["job"])) for job in jobs)
    name_width = min(max(longest, 3), max(columns // 4, 8))
    space = columns - len(_MARKS) - name_width
    shown = _chosen_columns(space)
    if longest > name_width:  # a long name gets what the columns leave
        name_width = min(longest, name_width + space - sum(_GAP + width for _, width in shown))
    titles = Text(_MARKS + "JOB".ljust(name_width), _HEAD)
    for column, width in shown:
        title = column.title.rjust(width) if column.right else column.title.ljust(width)
        titles.append(" " * _GAP + title)
    chosen = next((at for at, job in enumerate(jobs) if job["job"] == view.choice.job), 0)
    first, count = window(chosen, len(jobs), room - 1)
    troubled = {job for job, _ in view.problems}
    lines = [titles]
    for job in jobs[first : first + count]:
        lines.append(_row(view, job, shown, name_width, troubled))
    hidden = len(jobs) - count + view.status.get("jobs_not_shown", 0)
    if hidden and len(lines) < room:
        lines.append(Text(_MARKS + count_text(hidden, "more job"), _DIM))
    return lines[:room]


def _row(
    view: View,
    job: Mapping[str, Any],
    shown: Sequence[tuple[_Column, int]],
    name_width: int,
    troubled: set[str],
) -> Text:
    chosen = job["job"] == view.choice.job
    line = Text(">" if chosen else " ")
    line.append("! " if job["job"] in troubled else "  ", _BAD)
    name_style = _HEAD if chosen else "" if job["ranks_connected"] else _DIM
    line.append(fit(printable(job["job"]), name_width, view.glyphs), name_style)
    for column, width in shown:
        line.append(" " * _GAP)
        cell = _cut(column.cell(view, job, width), width, view.glyphs)
        space = " " * (width - cell.cell_len)
        line.append_text(Text.assemble(space, cell) if column.right else Text.assemble(cell, space))
    return line


def _chosen_columns(space: int) -> list[tuple[_Column, int]]:
    """Return the columns that fit into so many cells, and their widths: first those that
    tell most, then wider ones.
    """
    widths = dict[str, int]()
    for name in _IMPORTANCE:
        wanted = {**widths, name: widths.get(name, -1) + 1}
        if wanted[name] >= len(_COLUMNS[name].widths):
            continue
        if sum(_GAP + _COLUMNS[each].widths[at] for each, at in wanted.items()) <= space:
            widths = wanted
    return [
        (column, column.widths[widths[name]]) for name, column in _COLUMNS.items() if name in widths
    ]


def _ordered(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(status["jobs"], key=lambda job: (not job["ranks_connected"], job["job"]))


def window(chosen: int, count: int, room: int) -> tuple[int, int]:
    """Return the first line of a list that is shown, and how many are, so that the
    chosen one is among them.

    If the list is longer than `room`, its last line is left for the number of others.
    """
    if count <= room:
        return 0, count
    shown = max(room - 1, 1)
    return min(max(chosen - shown // 2, 0), count - shown), shown


# -- cells


def _ranks_cell(view: View, job: Mapping[str, Any], width: int) -> Text:
    here = job.get("ranks_here")
    connected = printable(str(job["ranks_connected"]))
    return Text(f"{connected}/{len(here)}" if here else connected)


def _step_cell(view: View, job: Mapping[str, Any], width: int) -> Text:
    return Text(_step(job["last_sealed"]))


def _stored_cell(view: View, job: Mapping[str, Any], width: int) -> Text:
    return Text(_step(job["last_durable"]))


def _age_cell(view: View, job: Mapping[str, Any], width: int) -> Text:
    durable = job["last_durable"]
    if durable is None:
        return Text("never" if job["ranks_connected"] else "-", _WARN)
    age = durable["age_seconds"]
    return Text("-" if age is None else short_span(age + view.elapsed))


def _room_cell(view: View, job: Mapping[str, Any], width: int) -> Text:
    room = job["room_for"]
    if room is None:
        return Text("-", _DIM)
    return Text(str(room) if room < 1000 else "999+", _BAD if room < LITTLE_ROOM else "")


def _held_cell(view: View, job: Mapping[str, Any], width: int) -> Text:
    return _cost(view.trend(job).held, width, view.glyphs)


def _lost_cell(view: View, job: Mapping[str, Any], width: int) -> Text:
    return _cost(view.trend(job).lost, width, view.glyphs)


def _cost(values: Sequence[float], width: int, glyphs: Glyphs) -> Text:
    if not values:
        return Text("-", _DIM)
    return Text.assemble(
        (spark(values, width - 8, glyphs), "cyan"), f" {seconds_text(values[-1]):>7}"
    )


def _saving_cell(view: View, job: Mapping[str, Any], width: int) -> Text:
    saving = next(iter(job.get("saving", ())), None)
    if saving is None:
        waiting = "waits" if job.get("delivered") else "queued" if job["pending"] else "-"
        return Text(waiting, _DIM)
    share = saving["done_bytes"] / max(saving["total_bytes"], 1)
    percent = f"{100 * share:.0f} %"
    if width < 8:
        return Text(percent, _GOOD)
    rest = ""
    if width >= _SAVING_WIDTHS[-1]:
        rest = f"  {_rate(saving)}"
    line = bar(share, width - 6 - (_SAVING_WIDTHS[-1] - 16 if rest else 0), view.glyphs)
    line.append(f" {percent:>5}{rest}")
    return line


def _rate(saving: Mapping[str, Any]) -> str:
    if saving["seconds_left"] is None:
        return ""
    rate = f"{size_text(saving['bytes_per_second'])}/s"
    return f"{rate:>10}  {short_span(saving['seconds_left'])} left"


_SAVING_WIDTHS = (6, 14, 44)
_COLUMNS = {
    "ranks": _Column("RANKS", (5,), _ranks_cell, right=True),
    "step": _Column("STEP", (8,), _step_cell, right=True),
    "stored": _Column("STORED", (8,), _stored_cell, right=True),
    "age": _Column("AGE", (6,), _age_cell, right=True),
    "room": _Column("ROOM", (4,), _room_cell, right=True),
    "held": _Column("HELD", (16, 24, 32), _held_cell),
    "lost": _Column("LOST", (16, 24, 32), _lost_cell),
    "saving": _Column("SAVING", _SAVING_WIDTHS, _saving_cell),
}
_IMPORTANCE = (
    "age", "saving", "room", "step", "ranks", "held", "saving", "lost", "stored", "saving",
    "held", "lost", "held", "lost",
)  # fmt: skip
"""The columns in the order in which they get their first width, and then wider ones."""


# -- the panel of one job, and its ranks


def _panel(view: View, job: Mapping[str, Any], columns: int) -> list[Text]:
    """Return the lines about the chosen job."""
    trend, durable, sealed = view.trend(job), job["last_durable"], job["last_sealed"]
    newest = "no checkpoint yet"
    if durable is not None:
        age = durable["age_seconds"]
        newest = f"step {_step(durable)}" + (
            "" if age is None else f", {span_text(age + view.elapsed)} ago"
        )
        newest += _size(trend)
    room = job["room_for"]
    facts: list[tuple[str, str | Text]] = [
        ("in memory", "-" if sealed is None else f"step {_step(sealed)}{_copied(job)}"),
        ("on storage", newest + ("" if room is None else f"; room for {room:,d} more")),
    ]
    facts += [("saving", _save_text(saving)) for saving in job.get("saving", ())]
    facts += [(name, _history(name, trend, columns, view)) for name in ("held", "lost")]
    if error := job["last_error"]:
        step = "" if error["step"] is None else f"step {error['step']}, "
        said = f"{step}{span_text(error['age_seconds'] + view.elapsed)} ago: {error['reason']}"
        facts.append(("last error", Text(printable(said), _BAD)))
    lines = _title(job, columns)
    for name, value in facts:
        text = value if isinstance(value, Text) else Text(printable(value))
        parts = wrapped(text.plain, max(columns - 14, 10))
        if len(parts) == 1:
            lines.append(Text.assemble(f"  {name:<12}", text))
            continue
        for number, part in enumerate(parts):
            lines.append(Text.assemble(f"  {name if not number else '':<12}", (part, text.style)))
    return lines


def _copied(job: Mapping[str, Any]) -> str:
    """Return the newest step in the memory of other nodes, as text, or ""."""
    step, why = job.get("replicated"), job.get("replicas_off")
    newest = "" if step is None else f"; step {step:,d} in the memory of other nodes, too"
    return newest + (f"; no more copies: {why}" if why else "")


def _size(trend: Trend) -> str:
    if trend.nbytes is None or trend.durable_seconds is None:
        return ""
    return f", {size_text(trend.nbytes)} durable after {seconds_text(trend.durable_seconds)}"


def _save_text(saving: Mapping[str, Any]) -> str:
    where = f"step {_step(saving)}" if "step" in saving else saving["tag"]
    progress = progress_text(
        saving["done_bytes"], saving["total_bytes"],
        saving["bytes_per_second"], saving["seconds_left"],
    )  # fmt: skip
    return f"{where}: {progress}"


def _history(name: str, trend: Trend, columns: int, view: View) -> str | Text:
    values = trend.held if name == "held" else trend.lost
    if not values:
        why = view.seen.history if name == "held" else ""
        return f"not known yet{f': {why}' if why else ''}"
    told = (
        f" last {seconds_text(values[-1])}, median {seconds_text(statistics.median(values))}, "
        f"most {seconds_text(max(values))} of {len(values)}"
    )
    width = min(columns - 14 - len(told), max(len(trend.held), len(trend.lost), 8))
    if width < 8:
        short = f" last {seconds_text(values[-1])}"
        width, told = columns - 14 - len(short), short
    return Text.assemble((spark(values, width, view.glyphs), "cyan"), told)


def _ranks(view: View, job: Mapping[str, Any], columns: int, room: int) -> list[Text]:
    ranks, hidden = job.get("ranks", []), job.get("ranks_not_shown", 0)
    lines = _title(job, columns)
    if not ranks:
        why = "no rank of this attempt is here"
        if hidden:
            why = f"{count_text(hidden, 'rank')}, for which the report has no room"
        elif job["ranks_connected"]:
            why = "the report has no ranks"
        return [*lines, Text(f"  {why}", _DIM)][:room]
    lines.append(Text(f"{'RANK':>6}  {'PID':>8}  SLOTS", _HEAD))
    space = max(room - len(lines), 0)
    rest = ranks[view.choice.scrolled :]
    shown = rest if len(rest) + bool(hidden) <= space else rest[: max(space - 1, 0)]
    for rank in shown:
        number, pid = printable(str(rank["rank"])), printable(str(rank["pid"] or "-"))
        line = Text(f"{number:>6}  {pid:>8}  ")
        if not rank["connected"]:
            line.append("not connected  ", _WARN)
        for at, slot in enumerate(rank["slots"]):
            line.append(", " if at else "")
            line.append(_slot_text(slot), _SLOT_STYLES.get(slot["state"], ""))
        lines.append(line)
    if (below := len(rest) - len(shown) + hidden) and len(lines) < room:
        lines.append(Text(f"  {count_text(below, 'more rank')}", _DIM))
    return lines[:room]


_SLOT_STYLES = {"free": _DIM, "filling": _WARN, "writing": _GOOD, "failed": _BAD}


def _slot_text(slot: Mapping[str, Any]) -> str:
    step = "" if slot["step"] is None else f"step {slot['step']} "
    return printable(f"{step}{slot['state']} ({size_text(slot['bytes'])})")


def _title(job: Mapping[str, Any], columns: int) -> list[Text]:
    here = job.get("ranks_here")
    there = f" of {len(here)} on {job['host']}" if here else ""
    ranks = f"{count_text(job['ranks_connected'], 'rank')} connected{there}"
    return _flow([job["job"], f"attempt {job['attempt']}", ranks], columns, _HEAD)


# -- texts


def spark(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """Return the last values as `width` characters, each as high as its share of the
    greatest one.
    """
    values = values[-width:] if width > 0 else ()
    most = max((value for value in values if math.isfinite(value)), default=0.0)
    steps = len(glyphs.spark) - 1

    def height(value: float) -> int:
        if not math.isfinite(value) or most <= 0:
            return steps if value > most else 0
        return round(steps * max(value, 0.0) / most)

    return "".join(glyphs.spark[height(value)] for value in values).rjust(max(width, 0))


def bar(share: float, width: int, glyphs: Glyphs) -> Text:
    """Return a bar that is filled to a share from 0 to 1."""
    done = min(max(int(share * width), 0), width)
    return Text.assemble((glyphs.done * done, _GOOD), (glyphs.left * (width - done), _DIM))


def seconds_text(seconds: float) -> str:
    """Return a short time with three digits, like `0.112 s` or `14.2 s`."""
    if seconds < 10:
        return f"{seconds:.3f} s"
    return f"{seconds:.1f} s" if seconds < 100 else short_span(seconds)


def short_span(seconds: float) -> str:
    """Return a time in its largest unit, in at most six characters: `59 min`, `23 h`."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{max(int(seconds // 60), 1)} min"
    if seconds < 2 * _DAY:
        return f"{int(seconds // 3600)} h"
    return f"{min(int(seconds // _DAY), 9999)} d"


def fit(text: str, width: int, glyphs: Glyphs) -> str:
    """Return a text that has exactly `width` cells: cut, or filled with spaces."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(width - 1, 0)) + glyphs.more[:width]


def wrapped(text: str, width: int) -> list[str]:
    """Return a text as lines of at most `width` cells, broken between words where that
    is possible.
    """
    lines, line = list[str](), ""
    for word in text.split(" "):
        if line and cell_len(line) + 1 + cell_len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
        *whole, line = chop_cells(line, max(width, 2)) or [""]
        lines += whole
    return [*lines, line]


def _both(left: str, right: str, columns: int, glyphs: Glyphs) -> str:
    """Return two texts at the two ends of a line; the right one only if it fits."""
    space = columns - cell_len(right) - 1
    if space < 12:
        return fit(left, columns, glyphs)
    return f"{fit(left, space, glyphs)} {right}"


def _flow(facts: Sequence[str], columns: int, style: str) -> list[Text]:
    """Return facts as lines, as many in each as fit."""
    lines, line = list[str](), ""
    for fact in map(printable, facts):
        joined = f"{line}   {fact}" if line else fact
        if line and cell_len(joined) > columns:
            lines.append(line)
            joined = fact
        line = joined
    return [Text(each, style) for each in [*lines, line]]


def _cut(line: Text, columns: int, glyphs: Glyphs) -> Text:
    """Return a line without what is beyond the window."""
    if line.cell_len <= columns:
        return line
    cut = line.copy()
    cut.truncate(max(columns - 1, 0))
    cut.append(glyphs.more[:columns])
    return cut


def _step(where: Mapping[str, Any] | None) -> str:
    if where is None:
        return "-"
    return "-" if where["step"] is None else printable(str(where["step"]))
