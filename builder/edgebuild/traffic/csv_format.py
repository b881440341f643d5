"""CSV traces: which columns carry the lengths, and a parser that works on whole blocks of bytes.

Columns are found by their names, in any order. A block whose rows all have as many commas as the header and no quotes
is parsed with numpy; any other block goes through the csv module, row by row, with the same result. Why a row is left
out is found for the rows that numpy could not read, one at a time, and by the same rule in both.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgebuild.errors import TrafficError
from edgebuild.traffic.histogram import Counts, HistogramBuilder
from edgebuild.traffic.skipped import NEGATIVE, NO_OUTPUT, NOT_WHOLE, shown, without
from edgebuild.traffic.source import Source

MOST_DIGITS = 9  # a longer number is no token count
TOO_MANY_DIGITS = f"of more than {MOST_DIGITS} digits"
FEWER_FIELDS = "with fewer fields than the header"
MORE_FIELDS = "with more fields than the header"
NOT_CSV = "not readable as CSV"
# what a field that is no token count is called; anything else is NOT_WHOLE
_TOLD_BY_FORM = (
    (NEGATIVE, re.compile(r"-[0-9]+(\.0)?")),
    (TOO_MANY_DIGITS, re.compile(rf"[0-9]{{{MOST_DIGITS + 1},}}(\.0)?")),
)


@dataclass(frozen=True)
class CsvFormat:
    """A CSV trace. Column names are compared without case and outer spaces.

    name      for people
    prompt    column with the prompt tokens
    output    column with the output tokens
    also      columns that must be there too, to tell it from others
    label     column with a task label, or ""
    failed    why a row with 0 output tokens is left out
    """

    name: str
    prompt: str
    output: str
    also: tuple[str, ...] = ()
    label: str = ""
    failed: str = NO_OUTPUT

    def matches(self, columns: Sequence[str]) -> bool:
        return {self.prompt, self.output, *self.also} <= set(columns)


# The first match wins. Column names: Azure/AzurePublicDataset (2023, 2024, multimodal 2025) and HPMLL/BurstGPT.
CSV_FORMATS = (
    CsvFormat("Azure 2025 CSV", "contexttokens", "generatedtokens", also=("numimages",)),
    CsvFormat("Azure 2023 CSV", "contexttokens", "generatedtokens"),
    CsvFormat(
        "BurstGPT CSV",
        "request tokens",
        "response tokens",
        label="log type",
        failed="failed, with 0 response tokens",
    ),
)


def header_columns(line: bytes) -> list[str]:
    """Column names of a header line, in comparable form."""
    try:
        return [name.strip().lower() for name in next(csv.reader([line.decode("utf-8", "replace")]), [])]
    except csv.Error:  # a field that no header has
        return []


def find_csv_format(head: bytes) -> CsvFormat | None:
    """The CSV format that the first line of a file announces."""
    columns = header_columns(_unix(head).split(b"\n", 1)[0])
    return next((form for form in CSV_FORMATS if form.matches(columns)), None)


def read_csv(source: Source, form: CsvFormat, builder: HistogramBuilder) -> None:
    """Count every row of the trace; memory is that of one block."""
    parser: _Rows | None = None
    for block in source.blocks():
        rows = _unix(block)
        if parser is None:
            header, rows = rows.split(b"\n", 1)
            columns = header_columns(header)
            for name in (form.prompt, form.output):
                if columns.count(name) > 1:
                    raise TrafficError(
                        f"{source.path}: column {name!r} stands {columns.count(name)} times in the header"
                    )
            parser = _Rows(columns, form, builder)
        parser.take(rows)


def _unix(block: bytes) -> bytes:
    """Line ends of every kind as a line feed."""
    return block.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in block else block


class _Rows:
    def __init__(self, columns: list[str], form: CsvFormat, builder: HistogramBuilder) -> None:
        self.width = len(columns)
        self.prompt = columns.index(form.prompt)
        self.output = columns.index(form.output)
        self.label = columns.index(form.label) if form.label in columns else -1
        self.form = form
        self.builder = builder
        self._before = 1  # lines of the file before the block in hand; the header is one
        self._gaps = b""  # the block in hand as the file has it, where that has blank lines

    def take(self, block: bytes) -> None:
        """Count the rows of a block of whole lines."""
        blank = 0
        self._gaps = b""
        if b"\n\n" in block or block.startswith(b"\n"):
            self._gaps = block
            block = b"".join(line + b"\n" for line in block.split(b"\n") if line)
            blank = self._gaps.count(b"\n") - block.count(b"\n")
        lines = self._take_fast(block) if block and b'"' not in block else 0
        if block and not lines:
            lines = self._take_slow(block)
        self._before += lines + blank

    def _line(self, row: int) -> int:
        """The line of the file on which row `row` (from 0) of the block in hand begins. Slow in a block with gaps."""
        if self._gaps:
            row = [at for at, line in enumerate(self._gaps.split(b"\n")) if line][row]
        return self._before + row + 1

    def _take_fast(self, block: bytes) -> int:
        """Count a block of plain rows and return their number; 0, and nothing counted, when they are not plain."""
        data = np.frombuffer(block, np.uint8)
        every = np.flatnonzero((data == ord(",")) | (data == ord("\n")))  # end of every field
        if every.size % self.width:
            return 0
        ends = every.reshape(-1, self.width)
        if not (data[ends[:, -1]] == ord("\n")).all() or (data[ends[:, :-1]] == ord("\n")).any():
            return 0
        starts = np.empty_like(ends)
        starts[:, 1:] = ends[:, :-1] + 1
        starts[1:, 0] = ends[:-1, -1] + 1
        starts[0, 0] = 0
        prompts, prompts_ok = _whole_numbers(data, starts[:, self.prompt], ends[:, self.prompt])
        outputs, outputs_ok = _whole_numbers(data, starts[:, self.output], ends[:, self.output])
        ok = prompts_ok & outputs_ok
        bad = np.flatnonzero(~ok)
        for row, a, b in zip(bad.tolist(), starts[bad, 0].tolist(), ends[bad, -1].tolist(), strict=True):
            lengths = self._lengths(block[a:b].decode("utf-8", "replace").split(","), row)
            if lengths is not None:
                prompts[row], outputs[row] = lengths
                ok[row] = True
        kept = self._count(prompts[ok], outputs[ok], lambda at: int(np.flatnonzero(ok)[at]))
        if self.label >= 0:
            rows = np.flatnonzero(ok)[kept]
            first, last = starts[rows, self.label].tolist(), ends[rows, self.label].tolist()
            self._count_labels(Counter(block[a:b] for a, b in zip(first, last, strict=True)))
        return int(ends.shape[0])

    def _take_slow(self, block: bytes) -> int:
        """Count a block of any rows and return the number of its lines."""
        prompts, outputs, labels, places = [], [], [], []
        lines = block.decode("utf-8", "replace").split("\n")[:-1]
        rows = csv.reader(lines)
        while True:
            place = rows.line_num  # a quoted field may take several lines
            try:
                row = next(rows, None)
            except csv.Error as error:  # an endless field
                self._skip(NOT_CSV, place, str(error))
                continue
            if row is None:
                break
            lengths = self._lengths(row, place)
            if lengths is None:
                continue
            prompts.append(lengths[0])
            outputs.append(lengths[1])
            labels.append(row[self.label].encode() if self.label >= 0 else b"")
            places.append(place)
        kept = self._count(np.array(prompts, np.int64), np.array(outputs, np.int64), places.__getitem__)
        if self.label >= 0:
            self._count_labels(Counter(label for label, keep in zip(labels, kept.tolist(), strict=True) if keep))
        return len(lines)

    def _lengths(self, row: list[str], place: int) -> tuple[int, int] | None:
        """Both lengths of row `place` of the block; None, and the row counted as skipped, when it lacks one."""
        if len(row) == self.width:
            prompt, output = _plain(row[self.prompt]), _plain(row[self.output])
            if _is_count(prompt) and _is_count(output):
                return int(prompt), int(output)
        self._skip(*self._fault(row, place))
        return None

    def _fault(self, row: list[str], place: int) -> tuple[str, int, str]:
        """Why a row has no lengths, the row, and the value that tells."""
        both = ((self.form.prompt, self.prompt), (self.form.output, self.output))
        if len(row) != self.width:
            lost = next((without(name) for name, column in both if column >= len(row)), FEWER_FIELDS)
            return lost if len(row) < self.width else MORE_FIELDS, place, f"{len(row)} of {self.width} fields"
        name, text = next((name, row[column].strip(" ")) for name, column in both if not _is_count(_plain(row[column])))
        if not text:
            return without(name), place, ""
        reason = next((reason for reason, form in _TOLD_BY_FORM if form.fullmatch(text)), NOT_WHOLE)
        return reason, place, shown(name, text)

    def _skip(self, reason: str, place: int, found: str) -> None:
        """Count row `place` of the block as skipped."""
        known = reason in self.builder.first_skipped
        self.builder.skip(reason, 1, "" if known else f"line {self._line(place):,}{': ' if found else ''}{found}")

    def _count(self, prompts: Counts, outputs: Counts, place: Callable[[int], int]) -> npt.NDArray[np.bool_]:
        """Count rows; a row without output tokens is skipped under the format's own reason.

        place   gives the row of the block that holds prompts[i] and outputs[i]
        """
        failed = (outputs == 0) & (prompts > 0)
        if failed.any():
            first = place(int(failed.argmax()))
            found = f"line {self._line(first):,}: {shown(self.form.output, 0)}"
            self.builder.skip(self.form.failed, int(failed.sum()), found)
        kept: npt.NDArray[np.bool_] = ~failed

        def where(at: int, of_output: bool) -> str:
            row = int(np.flatnonzero(~failed)[at])
            name, value = (self.form.output, outputs[row]) if of_output else (self.form.prompt, prompts[row])
            return f"line {self._line(place(row)):,}: {shown(name, int(value))}"

        kept[kept] = self.builder.add(prompts[kept], outputs[kept], where)
        return kept

    def _count_labels(self, labels: Counter[bytes]) -> None:
        for label, requests in labels.items():
            text = label.decode("utf-8", "replace").strip()
            if text:
                self.builder.label(text, requests)


def _plain(text: str) -> str:
    """A number without outer spaces and without the `.0` that some writers add to whole numbers."""
    return text.strip(" ").removesuffix(".0")


def _is_count(text: str) -> bool:
    return len(text) <= MOST_DIGITS and text.isascii() and text.isdigit()


def _whole_numbers(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[Counts, npt.NDArray[np.bool_]]:
    """The whole numbers between `starts` and `ends`, and which of the fields are one (by the rule of `_plain`)."""
    starts, ends = starts.copy(), ends.copy()
    for _ in range(8):  # more padding than that is no number
        leading = (starts < ends) & (data[starts] == ord(" "))
        trailing = (starts < ends) & (data[ends - 1] == ord(" "))
        if not leading.any() and not trailing.any():
            break
        starts += leading
        ends -= trailing & (starts < ends)
    whole = (ends - starts > 2) & (data[ends - 1] == ord("0")) & (data[ends - 2] == ord("."))
    digits = ends - starts - 2 * whole
    ok = (digits >= 1) & (digits <= MOST_DIGITS)
    values = np.zeros(starts.size, np.int64)
    for place in range(int(digits[ok].max()) if ok.any() else 0):
        here = ok & (place < digits)
        digit = data[np.where(here, starts + place, 0)].astype(np.int64) - ord("0")
        ok &= ~here | ((digit >= 0) & (digit <= 9))
        values = np.where(here, values * 10 + digit, values)
    return values, ok
