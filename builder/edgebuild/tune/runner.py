"""Runs one trial as `python -m edgert.trial`, in a process of its own that ends when this one does."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

Report = Callable[[float], None]


class TrialFailed(Exception):
    """The trial ended without figures; the text says why, in one line."""


class Runner(Protocol):
    """job → what edgert.trial found. Raises TrialFailed. report: share of the requests that are done."""

    def __call__(self, job: Mapping[str, Any], report: Report) -> dict[str, Any]: ...


def run_process(job: Mapping[str, Any], report: Report, *, timeout_s: float | None = None) -> dict[str, Any]:
    """The Runner of a real machine. timeout_s: a trial that takes longer is ended and has failed."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "edgert.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the trial
        )
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(timeout_s, process.kill) if timeout_s is not None else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        result: dict[str, Any] | None = None
        try:
            with contextlib.suppress(BrokenPipeError):  # it ended at once: stderr says why
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
            for line in process.stdout:
                message = json.loads(line)
                if "progress" in message:
                    done, of = message["progress"]
                    report(done / max(of, 1))
                else:
                    result = message["result"]
            code = process.wait()
        except ValueError:
            raise TrialFailed("the trial printed something that is not its own") from None
        finally:
            timed_out = timer is not None and not timer.is_alive()
            if timer is not None:
                timer.cancel()
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.stdout.close()
        if result is not None and code == 0:
            return result
        if timed_out:
            raise TrialFailed(f"not done after {timeout_s:g} s")
        errors.seek(0)
        raise TrialFailed(_last_line(errors.read().decode("utf-8", "replace"), code))


def _last_line(text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and code > 0:
        return lines[-1][:500]
    how = f"signal {-code}" if code < 0 else f"status {code}"
    if code == -9:
        how += " (killed: out of memory?)"
    return f"the trial ended with {how}{': ' + lines[-1][:300] if lines else ''}"
