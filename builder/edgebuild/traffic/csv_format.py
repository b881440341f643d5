"""CSV traces: which columns carry the lengths, and a parser that works on whole blocks of bytes.

Columns are found by their names, in any order. A block whose rows all have as many commas as the header and no quotes
is parsed with numpy; any other block goes through the csv module, row by row, with the same result.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgebuild.errors import TrafficError
from edgebuild.traffic.histogram import Counts, HistogramBuilder
from edgebuild.traffic.source import Source

MOST_DIGITS = 9  # a longer number is no token count
BAD_ROW = "not a row of this format"


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
    failed: str = "no output tokens"

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
        failed="failed request (0 response tokens)",
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

    def take(self, block: bytes) -> None:
        """Count the rows of a block of whole lines."""
        if b"\n\n" in block or block.startswith(b"\n"):
            block = b"".join(line + b"\n" for line in block.split(b"\n") if line)
        if not block:
            return
        if b'"' in block or not self._take_fast(block):
            self._take_slow(block)

    def _take_fast(self, block: bytes) -> bool:
        """Count a block of plain rows; False, and nothing counted, when the rows are not plain."""
        data = np.frombuffer(block, np.uint8)
        every = np.flatnonzero((data == ord(",")) | (data == ord("\n")))  # end of every field
        if every.size % self.width:
            return False
        ends = every.reshape(-1, self.width)
        if not (data[ends[:, -1]] == ord("\n")).all() or (data[ends[:, :-1]] == ord("\n")).any():
            return False
        starts = np.empty_like(ends)
        starts[:, 1:] = ends[:, :-1] + 1
        starts[1:, 0] = ends[:-1, -1] + 1
        starts[0, 0] = 0
        prompts, prompts_ok = _whole_numbers(data, starts[:, self.prompt], ends[:, self.prompt])
        outputs, outputs_ok = _whole_numbers(data, starts[:, self.output], ends[:, self.output])
        ok = prompts_ok & outputs_ok
        self.builder.skip(BAD_ROW, int((~ok).sum()))
        kept = self._count(prompts[ok], outputs[ok])
        if self.label >= 0:
            rows = np.flatnonzero(ok)[kept]
            first, last = starts[rows, self.label].tolist(), ends[rows, self.label].tolist()
            self._count_labels(Counter(block[a:b] for a, b in zip(first, last, strict=True)))
        return True

    def _take_slow(self, block: bytes) -> None:
        prompts, outputs, labels = [], [], []
        bad = 0
        rows = csv.reader(block.decode("utf-8", "replace").split("\n")[:-1])
        while True:
            try:
                row = next(rows, None)
            except csv.Error:  # an endless field
                row = []
            if row is None:
                break
            fields = [_plain(row[self.prompt]), _plain(row[self.output])] if len(row) == self.width else []
            if not fields or not all(text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS for text in fields):
                bad += 1
                continue
            prompts.append(int(fields[0]))
            outputs.append(int(fields[1]))
            labels.append(row[self.label].encode() if self.label >= 0 else b"")
        self.builder.skip(BAD_ROW, bad)
        kept = self._count(np.array(prompts, np.int64), np.array(outputs, np.int64))
        if self.label >= 0:
            self._count_labels(Counter(label for label, keep in zip(labels, kept.tolist(), strict=True) if keep))

    def _count(self, prompts: Counts, outputs: Counts) -> npt.NDArray[np.bool_]:
        """Count rows; a row without output tokens is skipped under the format's own reason."""
        failed = (outputs == 0) & (prompts > 0)
        self.builder.skip(self.form.failed, int(failed.sum()))
        kept: npt.NDArray[np.bool_] = ~failed
        kept[kept] = self.builder.add(prompts[kept], outputs[kept])
        return kept

    def _count_labels(self, labels: Counter[bytes]) -> None:
        for label, requests in labels.items():
            text = label.decode("utf-8", "replace").strip()
            if text:
                self.builder.label(text, requests)


def _plain(text: str) -> str:
    """A number without outer spaces and without the `.0` that some writers add to whole numbers."""
    return text.strip(" ").removesuffix(".0")


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
