"""Runs `edgebuild` and `edgert` as a user does: the installed console scripts, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(sys.executable).parent
TOY_LIMITS = "limits: {context_tokens: 256, max_chunk: 64, max_prefill_cells: 6, max_decode_cells: 6}"


@dataclass(frozen=True)
class Ran:
    """What a finished command left: exit code, both streams, CPU seconds of the process."""

    code: int
    out: str
    err: str
    cpu_s: float

    @property
    def error_line(self) -> str:
        """The one line on stderr that is an error; fails where there is a traceback or more than one."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith(("edgebuild: ", "edgert: "))]
        assert len(lines) == 1, self.err
        return lines[0]


def command(name: str, *arguments: str | Path) -> list[str]:
    """The command line of a console script of this environment."""
    return [str(SCRIPTS / name), *map(str, arguments)]


def environment(**changed: str) -> dict[str, str]:
    """This one's, without a terminal's width or colours in the output, one thread a process."""
    return {
        **os.environ,
        "COLUMNS": "200",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "EDGEBUILD_TUNING": os.devnull,  # what was tuned on this machine is no part of a test
    } | changed


def run(arguments: Sequence[str | Path], cwd: Path | None = None, **changed: str) -> Ran:
    """Run `arguments` (a script's name first) to its end; `changed` are environment variables."""
    name, *rest = arguments
    line = command(str(name), *rest) if name in ("edgebuild", "edgert") else [str(name), *map(str, rest)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            line, cwd=cwd, env=environment(**changed), stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        _, status, usage = os.wait4(process.pid, 0)  # the usage of this one child
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode())
    return Ran(process.returncode, texts[0], texts[1], usage.ru_utime + usage.ru_stime)


_PEAK = """
import json, resource, subprocess, sys
code = subprocess.run(sys.argv[2:], stdin=subprocess.DEVNULL).returncode
with open(sys.argv[1], "w") as file:
    json.dump([code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024], file)
"""


def peak_bytes(arguments: Sequence[str | Path], folder: Path) -> int:
    """Peak resident memory of a command and what it waits for, the largest process of them. Fails where it fails.

    Measured by a small process between: a child starts with the peak of the process that it was forked from.
    """
    name, *rest = arguments
    line = command(str(name), *rest) if name in ("edgebuild", "edgert") else [str(name), *map(str, rest)]
    report = folder / "peak.json"
    subprocess.run([sys.executable, "-c", _PEAK, str(report), *line], env=environment(), check=True, cwd=folder)
    code, peak = json.loads(report.read_text())
    assert code == 0, line
    return int(peak)


def write_profile(folder: Path, name: str, extends: str, *lines: str) -> Path:
    """A toy profile on top of a bundled one: small context, few cells."""
    path = folder / f"{name}.yaml"
    path.write_text(
        "\n".join([f"extends: {extends}", f"name: {name}", "description: a toy", TOY_LIMITS, *lines]) + "\n"
    )
    return path
