"""Mutates an artifact many times: every mutation must be refused with an EdgertError before a backend is opened.

    python tests/fuzz_artifact.py --count 10000 --seed 0 [ARTIFACT]

Without ARTIFACT a toy one is made. Works in a scratch copy; exit code 1 when a mutation was accepted or crashed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from artifact_mutations import MUTATIONS, Neutral, Scratch
from edgert.errors import EdgertError
from edgert.loading import plan_loading


@dataclass
class Result:
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def run(artifact: Path, work: Path, *, count: int, seed: int) -> Result:
    """Mutate `count` times. The untouched artifact must load, or nothing is proven."""
    scratch = Scratch(artifact, work / "artifact")
    plan_loading(scratch.work, {})
    rng = random.Random(seed)
    result = Result()
    done = 0
    while done < count:
        mutation = rng.choice(MUTATIONS)
        try:
            what = mutation(scratch, rng)
        except Neutral:
            continue
        done += 1
        try:
            plan_loading(scratch.work, {})
        except EdgertError as error:
            result.refused[mutation.__name__] += 1
            if len(str(error)) > 2000 or "\x00" in str(error):
                result.failures.append(f"#{done} {what}: an error nobody can read: {str(error)[:200]!r}")
        except Exception as error:
            result.failures.append(f"#{done} {what}: crashed with {type(error).__name__}: {str(error)[:200]}")
        else:
            result.failures.append(f"#{done} {what}: ACCEPTED")
        scratch.restore()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", nargs="?", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # a memory-backed directory keeps 10,000 copies off the disk
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        artifact = options.artifact
        if artifact is None:
            from toy_artifact import make_artifact

            artifact = make_artifact(Path(folder) / "toy")
        start = time.perf_counter()
        result = run(artifact, Path(folder), count=options.count, seed=options.seed)
        took = time.perf_counter() - start
    for name, number in sorted(result.refused.items()):
        print(f"{number:7d} refused  {name}")
    for failure in result.failures[:50]:
        print(f"FAILED {failure}")
    print(f"{options.count} mutations, {len(result.failures)} not refused cleanly, {took:.0f} s, seed {options.seed}")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
