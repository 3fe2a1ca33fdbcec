"""A diagnosis' page as a browser sees it: everything is drawn, in its place, without a network.

Needs chromium. Where PENSTOCK_NEEDS_BROWSER is set, as `.ci/run` does, its absence is a failure and not a skipped test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.profile import Profile
from penstock.report.page import diagnosis_page
from penstock.report.plots import Check
from profiles import profile

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-crash-reporter",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)

LOOK = """<script>addEventListener('load', () => {
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const inside = (a, b) => a[0] >= b[0] - 1 && a[1] >= b[1] - 1 && a[2] <= b[2] + 1 && a[3] <= b[3] + 1;
const meet = (a, b) => a[0] < b[2] - 1 && b[0] < a[2] - 1 && a[1] < b[3] - 1 && b[1] < a[3] - 1;
const all = (at, what) => [...at.querySelectorAll(what)];
const name = e => e.tagName + ' ' + (e.getAttribute('class') || '') + ' ' + e.textContent.slice(0, 40);
const page = [0, 0, innerWidth, document.documentElement.scrollHeight];
const seen = {outside: [], overlaps: [], unseen: [], contrast: []};
for (const e of all(document, 'h1,h2,p,li,svg,.mark,.tile,.card'))
  if (!inside(box(e), page)) seen.outside.push(name(e));
for (const svg of all(document, 'svg')) {
  for (const e of all(svg, 'rect,circle,path,text')) {
    if (!inside(box(e), box(svg))) seen.outside.push(name(e));
    const style = getComputedStyle(e);
    if (style.fill === 'none' && style.stroke === 'none') seen.unseen.push(name(e));
    if (e.tagName === 'text' && box(e)[2] - box(e)[0] < 1) seen.unseen.push(name(e));
  }
  const texts = all(svg, 'text');
  texts.forEach((a, i) => texts.slice(i + 1).forEach(b => {
    if (meet(box(a), box(b))) seen.overlaps.push(name(a) + ' / ' + name(b)); }));
}
const level = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => { x /= 255;
  return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
const ratio = (a, b) => { const [x, y] = [level(a), level(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
for (const e of all(document, '.split i, h1, .what, .soft, svg text')) {
  const style = getComputedStyle(e), own = e.closest('.split i') || e.closest('.card') || document.body;
  const found = ratio(e.namespaceURI.endsWith('svg') ? style.fill : style.color, getComputedStyle(own).backgroundColor);
  if (e.textContent && found < 4.5) seen.contrast.push(name(e) + ' ' + found.toFixed(2));
}
seen.width = innerWidth;
seen.scroll = document.documentElement.scrollWidth;
seen.split = all(document, '.split i').map(e => box(e)[2] - box(e)[0]);
seen.bars = all(document, 'svg rect.bar').length;
seen.points = all(document, 'svg circle').length;
seen.lines = all(document, 'svg path.line').length;
seen.plots = all(document, 'svg').map(e => e.querySelector('title').textContent);
seen.fetched = performance.getEntriesByType('resource').map(e => e.name);
seen.dark = matchMedia('(prefers-color-scheme: dark)').matches;
const out = document.createElement('pre'); out.id = 'seen';
out.textContent = JSON.stringify(seen); document.body.append(out);
})</script>"""

Browse = Callable[..., dict[str, Any]]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        message = f"none of {', '.join(BROWSERS)} is installed"
        if os.environ.get("PENSTOCK_NEEDS_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)

    def browse(page: str, width: int = 1240, dark: bool = False) -> dict[str, Any]:
        """What the browser sees of a page, and what it says about it."""
        path = tmp_path / "page.html"
        path.write_text(page.replace("</body>", LOOK + "</body>"))
        scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
        own = [f"--user-data-dir={tmp_path / 'user'}", f"--window-size={width},1000", *scheme]
        with subprocess.Popen(
            [found, *SWITCHES, *own, "--dump-dom", path.as_uri()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as browser:
            try:
                dom, log = browser.communicate(timeout=120)
            finally:
                if browser.poll() is None:
                    os.killpg(browser.pid, signal.SIGKILL)
        content = re.search(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL)
        assert content is not None, log[-2000:]
        seen: dict[str, Any] = json.loads(content[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
        seen["console"] = [line for line in log.splitlines() if "CONSOLE" in line]
        return seen

    return browse


def assert_well(seen: dict[str, Any]) -> None:
    assert seen["console"] == []
    assert seen["fetched"] == []
    assert seen["outside"] == []
    assert seen["overlaps"] == []
    assert seen["unseen"] == []
    assert seen["contrast"] == []
    assert seen["scroll"] <= seen["width"]


@pytest.mark.parametrize(("width", "dark"), [(1240, False), (820, True), (500, False), (500, True)])
def test_everything_is_drawn_in_its_place_at_any_width_by_day_and_by_night(
    browse: Browse, width: int, dark: bool
) -> None:
    seen = browse(diagnosis_page(profile()), width, dark)
    assert_well(seen)
    assert seen["dark"] == dark
    assert seen["plots"] == ["Rate against cache size", "Rate against workers", "Waiting, step by step"]
    assert seen["bars"] >= 2 * len(profile().steps_s)
    assert seen["points"] >= 5
    assert seen["lines"] >= 8


def test_the_bar_is_divided_as_the_time_was(browse: Browse) -> None:
    whole = profile()
    parts = [whole.split.compute_s, whole.split.prep_stall_s, whole.split.fetch_stall_s, whole.split.thrashing_s]
    widths = browse(diagnosis_page(whole))["split"]
    shares = [width / sum(widths) for width in widths]
    assert shares == pytest.approx([part / sum(parts) for part in parts], abs=0.01)


@pytest.mark.parametrize(
    "unusual",
    [
        profile(workers=0, prep=(), prefetch_batches=0),
        profile(storage_samples_per_s=None, storage_bytes_per_s=None, storage=(), dataset_bytes=None, cache_bytes=None),
        profile(waits_s=(0.0,) * 7, steps_s=(1e-4,) * 7, operators=()),
        profile(steps_s=(0.2,) * 1000, waits_s=(0.1,) * 1000),
        profile(ranks=8, gpus=8, workers=16, cores=192),
        profile(script="<script>alert(1)</script>", loader="a&b" * 60, notes=("a note " * 60,)),
    ],
    ids=["no workers", "a stream", "tiny steps", "many steps", "many ranks", "odd names"],
)
def test_unusual_trainings_look_well_too(browse: Browse, unusual: Profile) -> None:
    assert_well(browse(diagnosis_page(unusual)))


def test_measured_points_lie_in_the_plots(browse: Browse) -> None:
    checks = [Check(share, workers, 150.0 * workers) for share in (0.2, 0.5, 1.0) for workers in (2, 4, 8)]
    plain, checked = browse(diagnosis_page(profile())), browse(diagnosis_page(profile(), checks))
    assert_well(checked)
    assert checked["points"] > plain["points"]


def test_what_is_wrong_would_be_seen(browse: Browse) -> None:
    page = diagnosis_page(profile()).replace(
        "</main>",
        '<img src="http://example.invalid/a.png"><p style="margin-left:3000px">far</p>'
        '<p class=soft style="color:#999">a</p><svg viewBox="0 0 9 9"><title>t</title><text x="1" y="5">one</text>'
        '<text x="1" y="5">two</text>'
        '<circle cx="40" cy="4" r="1"/></svg></main>',
    )
    seen = browse(page)
    assert seen["fetched"] or seen["console"]
    assert any("far" in name for name in seen["outside"])
    assert any(name.startswith("circle") for name in seen["outside"])
    assert seen["overlaps"]
    assert seen["contrast"]
