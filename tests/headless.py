"""A headless Chromium through its debugging pipe: a page's console, its requests, its size at a width, a picture of it.

Needs no package, only a browser: chromium or Chrome on the PATH, or EDGEBUILD_BROWSER.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--mute-audio"),
    *("--hide-scrollbars", "--remote-debugging-pipe", "--no-default-browser-check"),
)
# The browser reads commands from descriptor 3 and writes answers to 4.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for target, end in enumerate(ends, 3):
    os.dup2(end, target)
os.execv(sys.argv[3], sys.argv[3:])
"""
# Whatever reaches past the right edge of the window and is not inside something that scrolls by itself.
OVERFLOWING = """
(() => {
  const width = document.documentElement.clientWidth;
  const scrolls = e => { for (let p = e.parentElement; p; p = p.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return true; return false; };
  const wide = [...document.querySelectorAll('body *')].filter(
    e => e.getBoundingClientRect().right > width + 0.5 && !scrolls(e) && !e.closest('svg'));
  return JSON.stringify({page: document.documentElement.scrollWidth, width,
    wide: wide.slice(0, 5).map(e => `<${e.tagName} class=${e.className}> ${e.textContent.trim().slice(0, 40)}`),
    small: [...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().height).reduce(
      (a, b) => Math.min(a, b), 1e9)});
})()
"""


def find_browser() -> str | None:
    """The browser's path, or None where there is none."""
    named = os.environ.get("EDGEBUILD_BROWSER")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)


@dataclass(frozen=True)
class Seen:
    """A page at one width. messages: of the console; requests: what it loaded beside itself; overflow: what is wider
    than the window; text_px: the smallest text of a picture."""

    messages: tuple[str, ...]
    requests: tuple[str, ...]
    page_px: int
    width_px: int
    overflow: tuple[str, ...]
    text_px: float
    picture: bytes


class Browser:
    """`with Browser(find_browser()) as browser: browser.look(path, 390)`."""

    def __init__(self, program: str, timeout_s: float = 90.0) -> None:
        self._program, self._timeout_s = program, timeout_s
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._rest = b""

    def __enter__(self) -> Browser:
        self._home = tempfile.mkdtemp(prefix="edgebuild-browser-")
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        ends = (str(theirs_in), str(theirs_out))
        command = [sys.executable, "-c", LAUNCH, *ends, self._program, *FLAGS, f"--user-data-dir={self._home}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            self._attach()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _attach(self) -> None:
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", session=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._to)
        os.close(self._from)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    def look(self, page: Path, width_px: int, *, scheme: Literal["light", "dark"] = "light") -> Seen:
        """Load a file at a width, scroll nowhere, and say what came of it."""
        self._events.clear()
        size = {"width": width_px, "height": 900, "deviceScaleFactor": 1, "mobile": width_px < 600}
        self._call("Emulation.setDeviceMetricsOverride", session=True, **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", session=True, features=features)
        address = page.resolve().as_uri()
        self._call("Page.navigate", session=True, url=address)
        self._wait("Page.loadEventFired")
        found = json.loads(self._call("Runtime.evaluate", session=True, expression=OVERFLOWING)["result"]["value"])
        shot = self._call("Page.captureScreenshot", session=True, format="png", captureBeyondViewport=True)
        messages, requests = [], []
        for event in self._events:
            name, values = event["method"], event["params"]
            if name == "Runtime.consoleAPICalled":
                messages.append(f"{values['type']}: {values['args']}")
            elif name == "Runtime.exceptionThrown":
                messages.append(str(values["exceptionDetails"]["text"]))
            elif name == "Log.entryAdded":
                messages.append(f"{values['entry']['level']}: {values['entry']['text']}")
            elif name == "Network.requestWillBeSent" and values["request"]["url"] != address:
                requests.append(values["request"]["url"])
        return Seen(
            tuple(messages),
            tuple(requests),
            int(found["page"]),
            int(found["width"]),
            tuple(found["wide"]),
            float(found["small"]),
            base64.b64decode(shot["data"]),
        )

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page that was looked at last."""
        found = self._call("Runtime.evaluate", session=True, expression=expression, returnByValue=True)
        return found["result"].get("value")

    def _call(self, method: str, *, session: bool = False, **values: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": values}
        if session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        number = self._number
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _wait(self, event: str) -> None:
        while not any(seen["method"] == event for seen in self._events):
            self._read()

    def _read(self) -> dict[str, Any]:
        """The next message; events are kept."""
        deadline = time.monotonic() + self._timeout_s
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            block = os.read(self._from, 1 << 16) if ready else b""
            if not block:
                status = self._process.poll()
                raise RuntimeError(f"the browser did not answer within {self._timeout_s:.0f} s (exit code {status})")
            self._rest += block
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
        return message


def screenshot(pages: Sequence[Path], widths: Sequence[int], folder: Path) -> None:
    """Pictures of pages, for looking at them: `python tests/headless.py PAGE...`."""
    program = find_browser()
    assert program, "no browser"
    with Browser(program) as browser:
        for page in pages:
            for width in widths:
                for scheme in ("light", "dark"):
                    seen = browser.look(page, width, scheme=scheme)  # type: ignore[arg-type]
                    target = folder / f"{page.stem}-{width}-{scheme}.png"
                    target.write_bytes(seen.picture)
                    print(target, seen.page_px, seen.overflow, seen.messages, seen.requests, seen.text_px)


if __name__ == "__main__":
    screenshot([Path(name) for name in sys.argv[1:]], (1280, 390), Path.cwd())
