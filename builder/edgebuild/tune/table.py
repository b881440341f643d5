"""What each step gave, for the terminal. The columns are those of `edgert bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgert.figures import shown_figures

from edgebuild.tune.candidates import TITLES
from edgebuild.tune.records import Figures, Result, Trial
from edgebuild.tune.search import show_setting

_STYLES = {"wins": "green", "steady": "green", "loses": "yellow", "failed": "red", "drifts": "red"}


def print_result(console: Any, result: Result, trials: Sequence[Trial]) -> None:
    """Tables: the steps, the draft curve, the draft vocabulary. console: rich's."""
    _print(console, steps_table(result, trials))
    for trial in trials:
        if trial.verdict not in ("baseline", "measured"):
            line = f"{trial.number:>4}  {TITLES[trial.step]}: {trial.verdict}: {trial.reason}"
            console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    if result.curve is not None:
        _print(console, curve_table(result))
        console.print(f"draft length {result.curve.pick}: {result.curve.reason}", markup=False, soft_wrap=True)
    if result.draft_vocabulary is not None:
        _print(console, vocabulary_table(result))
        reason = result.draft_vocabulary.reason
        console.print(f"draft vocabulary {result.draft_vocabulary.pick:,}: {reason}", markup=False, soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def steps_table(result: Result, trials: Sequence[Trial]) -> Any:
    """A row for each trial that decided something by its figures; the chosen one is marked."""
    shown = [trial for trial in trials if trial.figures is not None and trial.verdict != "measured"]
    rows = [_plain(trial.figures) for trial in shown]
    columns = shown_figures(rows)
    table = _table("What each step gave", ["", "step", "change", *(figure.title for figure in columns), "verdict"], 3)
    for trial, figures in zip(shown, rows, strict=True):
        mark = ">" if trial.number == result.trial else ""
        change = "" if trial.changed is None else f"{show_setting(trial.before)} → {show_setting(trial.after)}"
        cells = [figure.show(figures.get(figure.key)) for figure in columns]
        step = TITLES[trial.step].replace(":", ": ")  # a place to wrap at
        table.add_row(mark, step, change, *cells, trial.verdict, style=_STYLES.get(trial.verdict, ""))
    return table


def curve_table(result: Result) -> Any:
    """Draft length against step time, accepted length and tokens per ms, over all and by task."""
    assert result.curve is not None
    tasks = sorted({task for point in result.curve.points for task in point.by_task})
    titles = [
        "drafts",
        "step ms",
        "accepted length",
        "tokens/ms",
        *(f"{task or 'no task'} tokens/ms" for task in tasks),
    ]
    table = _table("Draft curve, one request at a time", titles, 0)
    for point in result.curve.points:
        by_task = [point.by_task.get(task) for task in tasks]
        cells = ["-" if e is None or e.tokens_per_ms is None else f"{e.tokens_per_ms:#.3g}" for e in by_task]
        table.add_row(
            str(point.draft_length),
            f"{point.step_ms:.2f}",
            f"{point.mean_accepted_length:.2f}",
            f"{point.tokens_per_ms:#.3g} ± {point.spread / 2:.2g}",
            *cells,
            style="green" if point.draft_length == result.curve.pick else "",
        )
    return table


def vocabulary_table(result: Result) -> Any:
    """Tokens that may be drafted against coverage and expected tokens per ms."""
    assert result.draft_vocabulary is not None
    titles = ["draft vocabulary", "coverage", "best draft length", "expected tokens/ms", "cost"]
    table = _table("Draft vocabulary", titles, 0)
    for option in result.draft_vocabulary.options:
        table.add_row(
            f"{option.tokens:,}",
            f"{option.coverage:.1%}",
            str(option.draft_length),
            f"{option.tokens_per_ms:#.3g}",
            "measured" if option.measured else "told from the measured one",
            style="green" if option.tokens == result.draft_vocabulary.pick else "",
        )
    return table


def _print(console: Any, table: Any) -> None:
    """The table as wide as its numbers need: a narrower terminal wraps its lines, and no digit is lost."""
    from rich.measure import Measurement

    for column in table.columns:
        if column.no_wrap:
            column.min_width = max(len(line) for cell in (column.header, *column.cells) for line in cell.split("\n"))
    width = console.width
    console.width = max(width, Measurement.get(console, console.options.update(max_width=1000), table).minimum)
    console.print(table, crop=False)
    console.width = width


def _plain(figures: Figures | None) -> dict[str, float | None]:
    return {} if figures is None else figures.model_dump()


def _table(title: str, columns: Sequence[str], texts: int) -> Any:
    """texts: columns at the left that hold words, which are wrapped where there is no room; numbers are not."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for number, column in enumerate(columns):
        if number < texts or column in ("verdict", "cost"):
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
    return table
