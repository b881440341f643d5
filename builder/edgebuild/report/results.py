"""What measurements say, as pictures and tables: cells and capture, acceptance, what each mechanism gave, trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgert.figures import BY_KEY, Figure

from edgebuild.report.evidence import Evidence
from edgebuild.report.numbers import UNKNOWN, Bar, Bars, Table, known, percent

if TYPE_CHECKING:
    from edgebuild.tune.records import Curve, Trial

# The three mechanisms, in the order in which they are tried, and what their bars are called.
ABLATION = {
    "baseline": "all three off",
    "chunked_prefill": "+ chunked prefill",
    "cuda_graph": "+ CUDA graphs",
    "mtp": "+ drafting",
}
ABLATION_FIGURES = ("output_tokens_per_s", "ttft_p95_ms", "longest_gap_ms")
LOST = ("loses", "failed", "not applicable", "no gain")


def cell_table(plan: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> Table:
    """Every planned cell with how it runs. states: of a doctor's report, () = not run here."""
    by_label = {state["cell"]: state for state in states}
    rows = []
    for cell in (*plan["prefill"]["cells"], *plan["decode"]["cells"]):
        state = by_label.get(cell["label"])
        how = "not run here" if state is None else ": ".join(filter(None, (state["status"], state["reason"])))
        gain = f"{cell['gain_weight_reads']:,.0f}" if cell["gain_weight_reads"] else "needed"
        shape = (f"{cell['batch']}", f"{cell['query_rows']:,}", f"{cell['kv_tier']:,}")
        rows.append((cell["label"], how, *shape, f"{cell['launches']:,}", gain))
    columns = ("<cell", "<capture", "batch", "rows", "KV tier", "launches in the trace", "saves, weight reads")
    return Table("Captured shapes", columns, tuple(rows))


def acceptance_rows(evidence: Evidence) -> list[tuple[str, str, tuple[float | None, ...], float | None, int | None]]:
    """(where it was measured, task, acceptance by position, mean accepted length, steps): tuning first, card last."""
    rows: list[tuple[str, str, tuple[float | None, ...], float | None, int | None]] = []
    drafted = [trial for trial in evidence.trials if trial.acceptance]
    best = next((trial for trial in drafted if trial.number == evidence.chosen), drafted[-1] if drafted else None)
    if best is not None:
        for task, each in sorted(best.acceptance.items()):
            where = f"tuning, trial {best.number}"
            rows.append((where, task or "(no task)", each.by_position, each.mean_accepted_length, each.steps))
    for name, report in evidence.benches:
        for task, entry in sorted((report.get("acceptance") or {}).items()):
            if entry["steps"]:
                places = tuple(entry["by_position"])
                rows.append((name, task or "(no task)", places, entry["mean_accepted_length"], entry["steps"]))
    for group, tasks in (evidence.build.get("acceptance") or {}).items():
        for task, entry in tasks.items():
            places = tuple(entry["acceptance"])
            where = f"drafter's card, {group.replace('_', ' ')}"
            # a card may hold the acceptance alone: that is what a plan reads of it
            rows.append((where, task, places, entry.get("mean_accepted_length"), entry.get("steps")))
    return rows


def acceptance_bars(evidence: Evidence, threshold: float | None) -> tuple[Bars, ...]:
    """A chart for each source; a row for each task and position."""
    groups: dict[str, list[Bar]] = {}
    for where, task, places, length, steps in acceptance_rows(evidence):
        for position, rate in enumerate(places, 1):
            first = position == 1
            groups.setdefault(where, []).append(
                Bar(
                    label=f"{task}, position {position}" if first else f"position {position}",
                    value=known(rate, ".0%"),
                    width=percent(rate or 0.0, 1.0),
                    detail=f"{known(length, '.2f')} tokens a step, {known(steps, ',')} steps" if first else "",
                    tone="chosen" if first else "plain",
                )
            )
    marks = () if threshold is None else ((percent(threshold, 1.0), f"threshold: {threshold:.0%}"),)
    return tuple(Bars(f"Accepted drafts: {where}", tuple(bars), marks) for where, bars in groups.items())


def curve_bars(curve: Curve) -> Bars:
    """Tokens a millisecond by draft length, and which one was picked."""
    widest = max(point.tokens_per_ms for point in curve.points)
    rows = tuple(
        Bar(
            label=f"{point.draft_length} drafts a step",
            value=f"{point.tokens_per_ms:.3f} ± {point.spread / 2:.3f}",
            width=percent(point.tokens_per_ms, widest),
            detail=f"{point.mean_accepted_length:.2f} tokens in {point.step_ms:.2f} ms",
            tone="chosen" if point.draft_length == curve.pick else "plain",
        )
        for point in curve.points
    )
    return Bars("Tokens a ms, by draft length", rows, note=f"{curve.pick} was picked: {curve.reason}.")


def ablation_bars(evidence: Evidence) -> tuple[Bars, ...]:
    """What each step gave: throughput, TTFT and gap, from the logbook's first trials and the chosen settings."""
    runs = [(ABLATION[trial.step], trial) for trial in evidence.trials if trial.step in ABLATION]
    chosen = next((trial for trial in evidence.trials if trial.number == evidence.chosen), None)
    if chosen is not None and all(trial.number != chosen.number for _, trial in runs):
        runs.append(("chosen settings", chosen))
    rows = [(label, trial.figures, trial.spread, trial) for label, trial in runs]
    charts = []
    for key in ABLATION_FIGURES:
        values = [None if figures is None else getattr(figures, key) for _, figures, _, _ in rows]
        if not any(value is not None for value in values):
            continue
        widest = max(value for value in values if value is not None)
        bars = tuple(
            Bar(
                label=label,
                value=_spread(BY_KEY[key], value, None if spread is None else getattr(spread, key)),
                width=percent(value or 0.0, widest),
                detail="" if key != ABLATION_FIGURES[0] else _why(trial, evidence.chosen),
                tone="plain" if trial.verdict in LOST and trial.number != evidence.chosen else "chosen",
            )
            for (label, _, spread, trial), value in zip(rows, values, strict=True)
        )
        figure = BY_KEY[key]
        charts.append(Bars(f"{figure.title} ({figure.better} is better)", bars))
    return tuple(charts)


def _why(trial: Trial, chosen: int | None) -> str:
    return f"trial {trial.number}" if trial.number == chosen else f"{trial.verdict}: {trial.reason}"


def bench_table(benches: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """Runs of `edgert bench`, side by side."""
    columns = (
        "<run",
        "requests",
        "at a time",
        "tokens/s",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "ITL p95 ms",
        "longest gap ms",
    )
    rows = tuple(
        (
            name,
            f"{report['requests']:,}",
            known(report.get("concurrency"), ","),
            known(report["output_tokens_per_s"], ",.1f"),
            *(_percentile(report, part, share) for part, share in BENCH_PARTS),
            known(report.get("longest_gap_ms"), ",.1f"),
        )
        for name, report in benches
    )
    return Table("Measured by edgert bench", columns, rows)


BENCH_PARTS = (("ttft_ms", "p50"), ("ttft_ms", "p95"), ("itl_ms", "p95"))


def _percentile(report: Mapping[str, Any], part: str, share: str) -> str:
    return known((report.get(part) or {}).get(share), ",.1f")


def tuning_table(trials: Sequence[Trial]) -> Table:
    """The log: what changed, what came of it, and what the device was like."""
    throughput, first = BY_KEY["output_tokens_per_s"], BY_KEY["ttft_p95_ms"]
    rows = []
    for trial in trials:
        figures, spread = trial.figures, trial.spread
        rows.append(
            (
                f"{trial.number}",
                trial.step.replace("_", " "),
                _change(trial),
                trial.verdict,
                _of(throughput, figures, spread),
                _of(first, figures, spread),
                _conditions(trial),
                trial.reason,
            )
        )
    columns = ("trial", "<step", "<changed", "<verdict", "tokens/s", "TTFT p95 ms", "<device", "<why")
    return Table("Trials", columns, tuple(rows))


def _of(figure: Figure, figures: Any, spread: Any) -> str:
    if figures is None:
        return UNKNOWN
    return _spread(figure, getattr(figures, figure.key), None if spread is None else getattr(spread, figure.key))


def _spread(figure: Figure, value: float | None, spread: float | None) -> str:
    if value is None:
        return UNKNOWN
    return figure.show(value) if spread is None else f"{figure.show(value)} ± {figure.show(spread / 2)}"


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _change(trial: Trial) -> str:
    if trial.changed is None or trial.before == trial.after:
        return trial.changed or ""
    return f"{trial.changed}: {_value(trial.before)} → {_value(trial.after)}"


def _conditions(trial: Trial) -> str:
    """Temperature, clock, throttling and power mode, as the trial left them."""
    look = trial.conditions_after or trial.conditions_loaded or trial.conditions_before
    if look is None:
        return trial.power_mode or UNKNOWN
    clock = look.gpu_clock_mhz if look.gpu_clock_mhz is not None else look.cpu_clock_mhz
    parts = [known(look.temperature_c, ".0f", " °C"), known(clock, ",.0f", " MHz")]
    parts += [*(look.throttle_reasons or ()), trial.power_mode or UNKNOWN]
    return ", ".join(part for part in parts if part != UNKNOWN) or UNKNOWN


def headroom_text(fraction: float, evidence: Evidence) -> str | None:
    """What keeping a share of the measured throughput free comes to; None where no throughput was measured."""
    chosen = next((t for t in evidence.trials if t.number == evidence.chosen and t.figures is not None), None)
    measured: float | None = None
    source = ""
    if chosen is not None and chosen.figures is not None:
        measured, source = chosen.figures.output_tokens_per_s, f"trial {chosen.number} of the tuning log"
    elif evidence.benches:
        name, report = max(evidence.benches, key=lambda item: float(item[1]["output_tokens_per_s"]))
        measured, source = float(report["output_tokens_per_s"]), name
    if measured is None:
        return None
    return (
        f"{measured:,.1f} output tokens/s were measured ({source}). With {fraction:.0%} kept free for peaks and heat, "
        f"count on {measured * (1 - fraction):,.1f}: that costs {measured * fraction:,.1f} tokens/s of the most that "
        "this device gave."
    )
