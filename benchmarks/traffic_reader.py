"""How fast and in how much memory a long CSV trace is read: writes synthetic rows, reads them in a fresh process.

python benchmarks/traffic_reader.py [--rows 10000000] [--format azure-2023|azure-2025|burstgpt]...
Writes benchmarks/results/traffic_reader.json. The limits of the project: 10 million rows in under 60 s and 300 MB.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from environment import environment

HERE = Path(__file__).resolve().parent
HEADERS = {
    "azure-2023": "TIMESTAMP,ContextTokens,GeneratedTokens",
    "azure-2025": "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
}
# Reads the file and says how long it took and the most memory that the process ever held.
CHILD = """
import json, resource, sys, time
from pathlib import Path
from edgebuild.traffic import read_traffic
kb = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = kb()
start = time.perf_counter()
histogram = read_traffic(Path(sys.argv[1]))
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "peak_rss_bytes": kb() * 1024, "rss_before_bytes": before * 1024,
                  "requests": histogram.requests, "skipped": dict(histogram.skipped)}))
"""


def write_trace(path: Path, kind: str, rows: int) -> None:
    """Write `rows` rows of log-normal lengths, in blocks."""
    random = np.random.default_rng(2023)
    start = datetime.datetime(2023, 11, 16, 18, 15, 46)
    with path.open("w", newline="") as file:
        file.write(HEADERS[kind] + "\r\n")
        for first in range(0, rows, 100_000):
            count = min(100_000, rows - first)
            prompts = np.clip(random.lognormal(6.9, 1.0, count), 1, 32_000).astype(int).tolist()
            outputs = np.clip(random.lognormal(4.8, 0.9, count), 0, 4_000).astype(int).tolist()
            lines = []
            for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), first):
                if kind == "burstgpt":
                    model = "ChatGPT" if row % 3 else "GPT-4"
                    log = "Conversation log" if row % 4 else "API log"
                    lines.append(f"{row},{model},{prompt},{output},{prompt + output},{log}")
                else:
                    stamp = (start + datetime.timedelta(milliseconds=37 * row)).isoformat(" ", "microseconds") + "0"
                    images = f"{row % 3}," if kind == "azure-2025" else ""
                    lines.append(f"{stamp},{images}{prompt},{output}")
            file.write("\r\n".join(lines) + ("\r\n" if first + count < rows else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--format", action="append", choices=sorted(HEADERS), dest="formats")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "traffic_reader.json")
    options = parser.parse_args()
    results = []
    for kind in options.formats or sorted(HEADERS):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace"
            print(f"{kind}: writing {options.rows:,} rows", flush=True)
            write_trace(path, kind, options.rows)
            size = path.stat().st_size
            child = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=True)
        figures = json.loads(child.stdout)
        load = round(os.getloadavg()[0], 1)  # a shared machine makes the seconds larger, never smaller
        results.append({"format": kind, "rows": options.rows, "file_bytes": size, "load_average": load, **figures})
        print(f"{kind}: {figures['seconds']:.1f} s, peak {figures['peak_rss_bytes'] / 1e6:.0f} MB", flush=True)
    record = {
        "what": "edgebuild.traffic.read_traffic on synthetic CSV, one fresh process a format",
        "limits": {"seconds": 60, "peak_rss_bytes": 300_000_000, "rows": 10_000_000},
        **environment("numpy"),
        "date": datetime.date.today().isoformat(),
        "results": results,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
