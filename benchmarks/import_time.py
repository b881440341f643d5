"""How long a cold `import edgert` takes, beyond starting the interpreter. Exits 1 past the limit of 0.3 s.

    python benchmarks/import_time.py [--runs 15] [--json]

Each run is a fresh interpreter; the median counts, and the load of the machine stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from environment import environment

LIMIT_S = 0.3
STATEMENTS = {
    "interpreter": "pass",
    "import edgert": "import edgert",
    "from edgert import Engine": "from edgert import Engine",
}


def seconds(statement: str, runs: int) -> float:
    """Median wall time of a fresh interpreter that runs `statement`."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    measured = {name: seconds(statement, options.runs) for name, statement in STATEMENTS.items()}
    base = measured.pop("interpreter")
    added = {name: value - base for name, value in measured.items()}
    load = os.getloadavg()[0]
    if options.json:
        rows = [
            {"statement": name, "added_s": value, "limit_s": LIMIT_S, "load": load} for name, value in added.items()
        ]
        what = (
            f"median of {options.runs} fresh interpreters, beyond the {base:.3f} s of starting one; limit {LIMIT_S} s"
        )
        print(json.dumps({"what": what, **environment("numpy"), "rows": rows}, indent=2))
    else:
        print(f"interpreter {base * 1e3:.0f} ms (load {load:.1f})")
        for name, value in added.items():
            print(f"{name}: +{value * 1e3:.0f} ms")
    return 0 if added["import edgert"] <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
