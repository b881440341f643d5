"""The simulator against a device: the same requests in the same closed loop, from the device's own costs.

python benchmarks/simulated_against_measured.py --artifact ARTIFACT --measured benchmarks/results/requests-smollm2.json

The measured file (benchmarks/measured_requests.py) holds each request's lengths and times, and what every cell cost on
that device. The simulator sees lengths, the number of streams and costs; nothing of it is fitted to the times.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

from edgebuild.simulate.artifact import read_subject, setting_of
from edgebuild.simulate.engine import simulate
from edgebuild.simulate.records import Arrival, Outcome
from edgert.costs import StepCosts, parse_costs
from environment import saved

WHAT = (
    "simulated ÷ measured of the same requests in the same closed loop, from the measured cost of every cell; p50 and "
    "mean are of the whole run, within_15 the share of requests whose total time is within 15 %"
)


def closed_loop(artifact: Path, costs: StepCosts, lengths: list[tuple[int, int]], streams: int) -> list[Outcome]:
    """Outcomes in the order of the list; each stream takes the next request when its own has ended.

    Arrivals follow from ends and ends from arrivals: what comes later changes nothing before it, so each round settles
    at least one arrival more.
    """
    # the measured artifact had no costs.json: without it every slot is admitted
    setting = setting_of(read_subject(artifact), costs, headroom=False)
    at_s = [0.0] * len(lengths)
    while True:
        arrivals = [Arrival(at, prompt, output) for at, (prompt, output) in zip(at_s, lengths, strict=True)]
        place = {id(arrival): number for number, arrival in enumerate(arrivals)}
        outcomes = sorted(simulate(setting, arrivals).outcomes, key=lambda each: place[id(each.arrival)])
        ends = sorted(each.last_s for each in outcomes)
        settled = [0.0] * streams + [ends[number - streams] for number in range(streams, len(lengths))]
        if all(abs(new - old) < 1e-9 for new, old in zip(settled, at_s, strict=True)):
            return outcomes
        at_s = settled


def compared(run: dict[str, Any], artifact: Path, costs: StepCosts) -> dict[str, Any]:
    """One row: figures of the run on the device and in virtual time."""
    requests = run["requests"]
    lengths = [(each["prompt_tokens"], each["output_tokens"]) for each in requests]
    outcomes = closed_loop(artifact, costs, lengths, run["concurrency"])
    row: dict[str, Any] = {"concurrency": run["concurrency"], "requests": len(requests)}
    totals = [(each.last_s - each.arrival.at_s) * 1e3 for each in outcomes]
    pairs = {
        "ttft": [(each.ttft_ms, real["ttft_ms"]) for each, real in zip(outcomes, requests, strict=True)],
        "tpot": [
            (each.tpot_ms, real["tpot_ms"])
            for each, real in zip(outcomes, requests, strict=True)
            if each.tpot_ms is not None and real["tpot_ms"] is not None
        ],
        "total": [(ours, real["total_ms"]) for ours, real in zip(totals, requests, strict=True)],
    }
    for name, each in pairs.items():
        ours, real = [pair[0] for pair in each], [pair[1] for pair in each]
        row |= {f"{name}_measured_ms": round(median(real), 3), f"{name}_simulated_ms": round(median(ours), 3)}
        row |= {f"{name}_p50": round(median(ours) / median(real), 3), f"{name}_mean": round(mean(ours) / mean(real), 3)}
    row["within_15"] = round(mean(abs(ours / real - 1) <= 0.15 for ours, real in pairs["total"]), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--measured", type=Path, required=True)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    measured = json.loads(args.measured.read_text())
    costs = parse_costs(json.dumps(measured["costs"]).encode())
    rows = [compared(run, args.artifact, costs) for run in measured["runs"]]
    facts = {key: measured[key] for key in ("device", "versions", "clocks", "commit") if key in measured}
    command = f"python benchmarks/simulated_against_measured.py --measured {args.measured.name}"
    saved({"what": WHAT, **facts, "command": command, "rows": rows}, args.output)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
