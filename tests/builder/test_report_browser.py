"""report.html in a real headless browser: no console message, nothing loaded, nothing wider than the window, readable.

Skipped where no browser is installed: chromium or Chrome on the PATH (CI images have one), or EDGEBUILD_BROWSER.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from edgebuild.report import Evidence, Sources, render_report
from headless import Browser, find_browser
from report_toys import SOURCES, full_evidence

# Contrast of each visible text with what lies behind it, by WCAG 2.2's formula; the lowest, and whose.
CONTRAST = r"""
(() => {
  const number = c => (c.match(/[\d.]+/g) || []).map(Number);
  const light = c => { const [r, g, b] = number(c).map(v => { v /= 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    const n = number(c); if (n.length === 3 || n[3] > 0) return c; } return 'rgb(255, 255, 255)'; };
  let worst = [99, ''];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || e.closest('svg')) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.className + ': ' + e.textContent.trim().slice(0, 40)];
  }
  return worst;
})()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no chromium or Chrome on the PATH, and EDGEBUILD_BROWSER names none")
    with Browser(program) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As a build leaves it, with everything measured, and with names that are as long as they can be."""
    folder = tmp_path_factory.mktemp("pages")
    long = "x" * 120
    manifest = {**SOURCES.manifest, "name": long, "model": {**SOURCES.manifest["model"], "name": long}}
    named = Sources(manifest, {**SOURCES.plan, "device": long}, SOURCES.histogram, SOURCES.config)
    texts = {
        "built": render_report(SOURCES, Evidence()),
        "measured": render_report(SOURCES, full_evidence()),
        "long": render_report(named, full_evidence()),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text)
    return {name: folder / f"{name}.html" for name in texts}


@pytest.mark.parametrize("width_px", [1280, 390])
@pytest.mark.parametrize("name", ["built", "measured", "long"])
def test_the_page_is_quiet_self_contained_and_fits_the_window(
    browser: Browser, pages: dict[str, Path], name: str, width_px: int
) -> None:
    seen = browser.look(pages[name], width_px)
    assert seen.messages == ()
    assert seen.requests == ()
    assert seen.overflow == ()
    assert seen.page_px <= seen.width_px == width_px
    assert seen.text_px >= 9, "text in the pictures"
    assert len(seen.picture) > 50_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_background(
    browser: Browser, pages: dict[str, Path], scheme: Literal["light", "dark"]
) -> None:
    browser.look(pages["measured"], 1280, scheme=scheme)
    ratio, where = browser.evaluate(CONTRAST)
    assert ratio >= 4.5, where
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def test_a_page_that_talks_loads_and_overflows_is_noticed(browser: Browser, tmp_path: Path) -> None:
    """The check itself."""
    page = tmp_path / "wrong.html"
    page.write_text('<div style="width:2000px">x</div><img src="missing.png"><script>console.error("no")</script>')
    seen = browser.look(page, 390)
    assert seen.overflow
    assert any("no" in message for message in seen.messages)
    assert any(request.endswith("missing.png") for request in seen.requests)
