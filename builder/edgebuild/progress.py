"""Progress of long work on stderr: a line per stage with its time, a bar while it runs where there is a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

Report = Callable[[float], None]


class Stages:
    """`with stages.stage("export") as report:` prints the stage and its time when it ends; `report(0.5)` moves its bar.

    In the end `seconds` says what each stage took, in order.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True, quiet=quiet)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[Report]:
        started = time.monotonic()
        columns = (TextColumn("  {task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
        try:
            with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as bars:
                task = bars.add_task(name, total=1.0)
                yield lambda fraction: bars.update(task, completed=fraction)
        except BaseException:
            self.console.print(f"  [red]✗[/] {name} [dim]after {time.monotonic() - started:.1f} s[/]", highlight=False)
            raise
        self.seconds[name] = time.monotonic() - started
        self.console.print(f"  [green]✓[/] {name} [dim]{self.seconds[name]:.1f} s[/]", highlight=False)

    def title(self, program: str, text: str) -> None:
        """The first line: what is done, from and to where."""
        self.console.print(Text.assemble((program, "bold"), f" {text}"), soft_wrap=True)

    def note(self, text: str) -> None:
        """A line of explanation below the stage that it belongs to."""
        self.console.print(f"    {text}", highlight=False, markup=False, style="dim", soft_wrap=True)
