"""The tables of docs/simulate.md: fixed against adaptive on every bundled traffic. python benchmarks/simulated.py

Needs no device and no artifact: cells are what the plan of a bundled profile captures, costs are estimated from that
profile (edgebuild.simulate.estimate), and the output depends on the sources alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgebuild.plan import ModelShape, make_plan
from edgebuild.profile import load_profile
from edgebuild.profile.loader import bundled_traffic, bundled_traffic_names
from edgebuild.simulate.arrivals import draw
from edgebuild.simulate.engine import simulate
from edgebuild.simulate.estimate import of_plan
from edgebuild.simulate.setting import Setting
from edgebuild.simulate.summary import Figures, Slo, changes, figures
from edgebuild.traffic import Histogram, read_traffic
from edgert.policy import Ratio
from edgert.scheduler import Limits
from edgert.slots import slots_to_allocate
from edgert.tempo import Targets

PAGE = Path(__file__).resolve().parent.parent / "docs" / "simulate.md"
BEGIN, END = "<!-- made by benchmarks/simulated.py -->", "<!-- end -->"
REQUESTS, SEED = 2000, 1
LOADS = (0.4, 0.8)

SMOLLM2 = ModelShape(
    layers=30, hidden_size=576, heads=9, kv_heads=3, head_dim=64, intermediate_size=1536, vocabulary_size=49_152,
    context_tokens=8192, weight_elements=134_515_008,
)  # fmt: skip
FOUR_B = ModelShape(
    layers=36, hidden_size=2560, heads=32, kv_heads=8, head_dim=128, intermediate_size=9728, vocabulary_size=151_936,
    context_tokens=40_960, weight_elements=4_022_468_096,
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A bundled profile, a model's shape, and the latencies that a request must keep."""

    profile: str
    model_name: str
    model: ModelShape
    slo: Slo


DEVICES = (
    Device("cpu", "SmolLM2-135M", SMOLLM2, Slo(ttft_ms=10_000, itl_ms=1500)),
    Device("orin-agx", "4B", FOUR_B, Slo(ttft_ms=10_000, itl_ms=1000)),
    Device("h200", "4B", FOUR_B, Slo(ttft_ms=500, itl_ms=50)),
)


@dataclass(frozen=True)
class Row:
    device: Device
    traffic: str
    load: float
    rate: float
    fixed: Figures
    adaptive: Figures


def settings_of(device: Device, histogram: Histogram) -> dict[str, Setting]:
    """The plan's cells under both policies."""
    plan = make_plan(load_profile(device.profile), histogram, device.model)
    costs = of_plan(plan)
    limits = Limits(
        cells=plan.cells,
        slots=slots_to_allocate(plan.slots, plan.decode.batch_sizes),
        context_tokens=plan.context_tokens,
        any_first_slot=plan.limits.backend == "onnxruntime",
        ratio=Ratio(plan.ratio.low, plan.ratio.start, plan.ratio.high),
        costs=costs,
        targets=Targets(device.slo.ttft_ms, device.slo.itl_ms),
    )
    return {
        name: Setting(replace(limits, adaptive=name == "adaptive"), costs, plan.slots) for name in ("fixed", "adaptive")
    }


def row(device: Device, traffic: str, load: float, requests: int = REQUESTS) -> Row:
    """One line of the table. load: arrivals as a share of what can be served at most."""
    histogram = read_traffic(bundled_traffic(traffic))
    settings = settings_of(device, histogram)
    at_once = [replace(each, at_s=0.0) for each in draw(histogram, 300, 1.0, 1.0, SEED)]
    rate = load * len(at_once) / simulate(settings["fixed"], at_once).end_s
    arrivals = draw(histogram, requests, rate, histogram.burstiness or 1.0, SEED)
    made = {name: figures(simulate(setting, arrivals), device.slo) for name, setting in settings.items()}
    return Row(device, traffic, load, rate, made["fixed"], made["adaptive"])


def lines(rows: Sequence[Row]) -> list[str]:
    """The Markdown table of one device."""
    head = ("traffic", "load", "TTFT p95, s", "", "longest gap, ms", "", "goodput, 1/s", "", "TPOT p95, ms", "tokens/s")
    out = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return out + [line(each) for each in rows]


def line(each: Row) -> str:
    fixed, adaptive = each.fixed, each.adaptive
    gains = changes(fixed, adaptive)
    cells = [each.traffic, f"{each.load:g}"]
    for key, form, scale in (
        ("ttft_ms_p95", ",.2f", 1e-3), ("longest_gap_ms", ",.1f", 1.0), ("goodput_per_s", ".4g", 1.0)
    ):  # fmt: skip
        before, after = getattr(fixed, key), getattr(adaptive, key)
        cells += [f"{format(before * scale, form)} → {format(after * scale, form)}", f"{gains.get(key, 0.0):+.1%}"]
    cells.append(f"{fixed.tpot_ms_p95 or 0:,.1f} → {adaptive.tpot_ms_p95 or 0:,.1f}")
    cells.append(f"{fixed.output_tokens_per_s:,.1f} → {adaptive.output_tokens_per_s:,.1f}")
    return f"| {' | '.join(cells)} |"


def tables(devices: Sequence[Device] = DEVICES, requests: int = REQUESTS) -> str:
    """Everything between the marks of the page."""
    parts = []
    for device in devices:
        slo = device.slo
        parts.append(
            f"**{device.model_name} on {device.profile}** (estimated costs; good: first token within "
            f"{slo.ttft_ms:,.0f} ms, no gap above {slo.itl_ms:,.0f} ms)\n"
        )
        rows = []
        for traffic in bundled_traffic_names():
            for load in LOADS:
                rows.append(row(device, traffic, load, requests))
                print(line(rows[-1]), file=sys.stderr, flush=True)
        parts.append("\n".join(lines(rows)) + "\n")
    return "\n".join(parts)


def main() -> None:
    made = tables()
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
