"""Tests the page in a real Chromium, with a real daemon and checkpoints of a model that
was trained.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.agent import Agent
from ckptd.daemon.page import checkpoints, overview
from ckptd.shared.errors import DaemonUnreachable
from tests.support.browser import CHROMIUM, DRIVER, MISSING, Browser, browser
from tests.support.daemons import Daemon, home, running, until
from tests.support.page import HOSTILE, Served, page_of

pytestmark = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason=MISSING)
TAB, ENTER, RIGHT = "\ue004", "\ue007", "\ue014"
STEPS = 6


class Scene:
    """A daemon, its page and a window. `status` replaces what the page asks the daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.status: Callable[[], Any] = daemon.status
        self.page: Served
        self.window: Browser

    def ask(self) -> Any:
        return self.status()

    def open(self, view: str, text: str) -> Browser:
        """Load a view of the page again, and wait until it shows a text."""
        self.window.open("about:blank")
        self.window.console()
        self.window.open(f"{self.page.url}#{view}")
        self.shows(text)
        return self.window

    def shows(self, text: str) -> None:
        self.window.until(lambda: text in self.window.text(), text)


def train(agent: Agent) -> None:
    """Train a model that learns y = 2 x, and save each step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        x = torch.randn(32, 8)
        loss = (model(x) - 2 * x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, HOSTILE: torch.arange(5.0)}
        metrics = {"loss": loss.item(), HOSTILE: float(step)}
        agent.snapshot(state, step=step, metrics=metrics).wait("durable", timeout=60)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with home() as place, running(place, forked=True) as daemon:
        agent = Agent("tiny", socket=place.socket)
        train(agent)
        made = Scene(daemon)
        file = Path(daemon.status()["history"])
        until(file.exists, "history")
        with page_of(place.root, made.ask) as page, browser() as window:
            made.page, made.window = page, window
            window.size(1280, 800)
            yield made
        agent.close()


@pytest.fixture(autouse=True)
def _as_it_was(scene: Scene) -> Iterator[None]:
    """Fail a test in which the page has logged an error, or was taken by a name."""
    yield
    found = scene.window.console()
    title = scene.window.run("return document.title")
    scene.status = scene.daemon.status
    assert (found, title == "taken") == ([], False)


def test_the_overview_needs_nothing_from_elsewhere(scene: Scene) -> None:
    window = scene.open("overview", "All is well")
    scene.shows("tiny")
    row = window.text("#view-overview tbody tr")
    assert row.split("\n")[0].startswith("tiny attempt 1")
    assert f"step {STEPS}" in row
    asked = window.run("return performance.getEntriesByType('resource').map(r => r.name)")
    assert {url.partition("?")[0] for url in asked} <= {
        f"{scene.page.url}api/live", f"{scene.page.url}api/history",
    }  # fmt: skip


def test_the_ranks_and_their_slots_stay_open_while_the_page_is_live(scene: Scene) -> None:
    window = scene.open("overview", "Ranks and slots")
    window.click("#view-overview summary")
    scene.shows("1 rank with ")
    scene.shows(f"durable step {STEPS}, ")
    clock = window.text("#live")
    window.until(lambda: window.text("#live") != clock, "newer data")
    assert f"pid {os.getpid()}" in window.text("#view-overview details")


def test_the_timeline_has_every_snapshot(scene: Scene) -> None:
    window = scene.open("timeline", f"{STEPS} snapshots")
    assert window.run("return document.querySelectorAll('rect.durable').length") == STEPS + 1
    rows = window.run(
        "return [...document.querySelectorAll('#view-timeline tbody th')].map(e => e.innerText)"
    )
    assert rows == [str(step) for step in range(STEPS, 0, -1)]
    window.run("document.querySelector('[data-plot=held] svg').focus()")
    said = "return document.querySelector('[data-plot=held] output').innerText"
    assert window.run(said).startswith(f"step {STEPS}: ")
    window.press("\ue011", RIGHT)  # Home
    assert window.run(said).startswith("step 2: ")


def test_checkpoints_are_sorted_by_a_metric(scene: Scene) -> None:
    window = scene.open("checkpoints", f"{STEPS} checkpoints of tiny")
    titles = "return [...document.querySelectorAll('#view-checkpoints th button')]"
    names = window.run(f"{titles}.map(e => e.innerText)")
    assert names[-2:] == sorted(["loss", HOSTILE], key=names.index)
    steps = (
        "return [...document.querySelectorAll('#view-checkpoints tbody a')].map(e => e.innerText)"
    )
    assert window.run(steps) == [str(step) for step in range(STEPS, 0, -1)]
    window.run(f"{titles.removeprefix('return ')}[{names.index(HOSTILE)}].click()")
    assert window.run(steps) == [str(step) for step in range(1, STEPS + 1)]


def test_metrics_may_have_the_names_of_what_every_object_has(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoints.Checkpoints.listing

    def listing(self: checkpoints.Checkpoints, job: str) -> dict[str, Any]:
        found = copy.deepcopy(real(self, job))
        found["checkpoints"][1]["metrics"] = {"__proto__": 1.5, "constructor": 2.5}
        return found

    monkeypatch.setattr(checkpoints.Checkpoints, "listing", listing)
    window = scene.open("checkpoints", "constructor")
    cells = "return [...document.querySelectorAll('[data-label=\"{}\"]')].map(e => e.innerText)"
    for name, value in (("__proto__", "1.5"), ("constructor", "2.5")):
        found = window.run(cells.format(name))
        assert (found[1], set(found[:1] + found[2:])) == (value, {"\u2013"})


def test_a_tensor_is_measured_and_a_hostile_key_is_text(scene: Scene) -> None:
    tag = f"step-{STEPS:08d}.a0001"
    window = scene.open(f"checkpoints/tiny/{tag}", "model.weight")
    assert HOSTILE in window.text()
    assert window.run("return document.querySelectorAll('img').length") == 0
    window.run("""
      const field = document.querySelector('input[name=filter]');
      field.focus();
      field.value = 'onerror';
      field.dispatchEvent(new Event('input', {bubbles: true}));
    """)
    assert window.run("return document.querySelectorAll('[data-measure]').length") == 1
    assert window.run("return document.activeElement.name") == "filter"
    window.click("[data-measure]")
    scene.shows("Norm")
    assert "5.4772" in window.text(".measure")
    assert window.run("return document.querySelectorAll('.bin').length") == 48
    window.click("[data-measure]")
    assert window.text(".measure") == ""


HOLD = """
const [part, answer] = arguments, fetch = window.fetch;
window.held = null;
window.fetch = async (url, options) => {
  const found = await fetch(url, options);
  if (window.held || !url.includes(part)) return found;
  await new Promise((go) => { window.held = go; });
  return answer ? new Response(answer) : found;
};
"""
RELEASE = "window.held(); return new Promise((done) => { setTimeout(done, 200); })"


def test_an_answer_that_comes_late_is_not_shown_for_another_address(scene: Scene) -> None:
    window = scene.open("checkpoints", "checkpoints of tiny")
    window.run(HOLD, "step-00000002")
    window.run("location.hash = '#checkpoints/tiny/step-00000002.a0001'")
    window.until(lambda: window.run("return !!window.held"), "answer for step 2")
    window.run("location.hash = '#checkpoints/tiny/step-00000003.a0001'")
    scene.shows("number 3 of the job")
    window.run(RELEASE)
    window.run("document.querySelector('input').dispatchEvent(new Event('input', {bubbles: true}))")
    assert "number 3 of the job" in window.text("#view-checkpoints")


def test_a_history_that_comes_late_is_not_shown_for_another_range(scene: Scene) -> None:
    window = scene.open("timeline", f"{STEPS} snapshots")
    choose = """
      const field = document.querySelector('#view-timeline [name=range]');
      field.value = arguments[0];
      field.dispatchEvent(new Event('change', {bubbles: true}));
    """
    late = '{"snapshots": [], "events": [], "note": "late", "truncated": false}'
    window.run(HOLD, "/api/history", late)
    window.run(choose, "3600")
    window.until(lambda: window.run("return !!window.held"), "answer for an hour")
    window.run(choose, "0")
    scene.shows(f"{STEPS} snapshots")
    window.run(RELEASE)
    assert f"{STEPS} snapshots" in window.text("#view-timeline")


def test_a_checkpoint_that_is_deleted_while_it_is_looked_at(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "FRESH_SECONDS", -1.0)
    tag = "step-00000001.a0001"
    window = scene.open(f"checkpoints/tiny/{tag}", "model.weight")
    shutil.rmtree(scene.daemon.home.root / "tiny" / tag)
    window.click("[data-measure]")
    scene.shows(f"no checkpoint tiny/{tag} in ")
    assert len(window.console()) == 1, "Chromium logs the status 404 by itself"
    window.run("location.hash = '#checkpoints/tiny'")
    scene.shows(f"{STEPS - 1} checkpoints of tiny")


def test_names_of_jobs_and_reasons_are_text(scene: Scene) -> None:
    found = scene.daemon.status()
    (job,) = found["jobs"]
    error = {"step": 7, "reason": HOSTILE, "age_seconds": 0.0}
    found["jobs"] = [{**job, "job": HOSTILE, "last_error": error, "announced": HOSTILE}]
    scene.status = lambda: found
    window = scene.open("overview", "the last save of step 7 failed")
    assert window.text().count("onerror") >= 4
    assert window.run("return document.querySelectorAll('img').length") == 0
    assert window.run("return document.getElementById('verdict').dataset.level") == "bad"


def test_a_save_shows_its_rate_and_the_time_left(scene: Scene) -> None:
    found = scene.daemon.status()
    (job,) = found["jobs"]
    saving = {"tag": "t", "done_bytes": 25, "total_bytes": 100, "bytes_per_second": 5_000_000,
              "seconds_left": 90.0}  # fmt: skip
    found["jobs"] = [{**job, "saving": [saving], "pending": ["t"]}]
    scene.status = lambda: found
    window = scene.open("overview", "25 %, 1 min left, 5.0 MB/s")
    assert window.run("return document.querySelector('td .meter i').style.width") == "25%"


def test_steps_in_other_nodes_are_shown(scene: Scene) -> None:
    found = scene.daemon.status()
    (job,) = found["jobs"]
    found["jobs"] = [{**job, "replicated": 1234, "replicas_off": HOSTILE}]
    scene.status = lambda: found
    window = scene.open(
        "overview", ", step 1,234 in the memory of other nodes, too, no more copies: "
    )
    assert window.run("return document.querySelectorAll('img').length") == 0


def test_a_daemon_that_is_gone_is_said_to_be(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "SILENT_SECONDS", 1.0)

    def gone() -> Any:
        raise DaemonUnreachable("no daemon at /s")

    window = scene.open("overview", "All is well")
    scene.status = gone
    scene.shows("The daemon has not answered for ")
    scene.shows("Last known at ")
    assert window.run("return document.getElementById('verdict').dataset.level") == "silent"
    assert "tiny" in window.text("#view-overview")


def test_everything_is_reached_with_the_keyboard(scene: Scene) -> None:
    window = scene.open("overview", "All is well")
    focused = "const e = document.activeElement; return e.getAttribute('href') || e.tagName"
    window.press(TAB)
    assert window.run(focused) == "#main"
    assert window.run("return document.activeElement.getBoundingClientRect().left >= 0"), (
        "the link that skips is seen while it has the focus"
    )
    for view in ("overview", "timeline", "checkpoints"):
        window.press(TAB)
        assert window.run(focused) == f"#{view}"
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert window.run(outline) == "solid"
    window.press(ENTER)
    scene.shows("Read again")
    assert window.run("return document.querySelector('nav [aria-current]').innerText") == (
        "Checkpoints"
    )


CONTRAST = """
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
  .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const found = rgb(getComputedStyle(e).backgroundColor);
    if (found.length < 4 || found[3] === 1) return found;
  }
  return [255, 255, 255];
};
const found = [];
for (const e of document.querySelectorAll('body *')) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  if (!own || !e.getClientRects().length || e.closest('script')) continue;
  const style = getComputedStyle(e);
  const color = e instanceof SVGElement ? style.fill : style.color;
  const [a, b] = [light(rgb(color)), light(ground(e))].sort((x, y) => y - x);
  found.push([(a + 0.05) / (b + 0.05), e.innerText || e.textContent]);
}
return found.sort((x, y) => x[0] - y[0]);
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(scene: Scene, scheme: str) -> None:
    scene.window.prefer(prefers_color_scheme=scheme)
    for view, text in (
        ("overview", "All is well"), ("timeline", "snapshots"), ("events", "daemon.ready"),
        ("checkpoints", "checkpoints of tiny"),
    ):  # fmt: skip
        found = scene.open(view, text).run(CONTRAST)
        assert len(found) > 20
        assert found[0][0] >= 4.5, found[:3]
    scene.window.prefer()


def test_a_phone_has_no_need_to_scroll_sideways(scene: Scene) -> None:
    scene.window.size(360, 740, phone=True)
    tag = f"step-{STEPS:08d}.a0001"
    for view, text in (
        ("overview", "All is well"), ("timeline", "snapshots"), ("events", "daemon.ready"),
        ("checkpoints", "checkpoints of tiny"), (f"checkpoints/tiny/{tag}", "model.weight"),
    ):  # fmt: skip
        window = scene.open(view, text)
        assert window.run("return document.documentElement.scrollWidth") <= 360, view
    scene.window.size(1280, 800)


def test_nothing_moves_for_those_who_want_that(scene: Scene) -> None:
    scene.window.prefer(prefers_reduced_motion="reduce")
    window = scene.open("overview", "All is well")
    moving = "return getComputedStyle(document.querySelector('.meter i')).transitionDuration"
    assert window.run(moving) in ("0s", "")
    scene.window.prefer()
