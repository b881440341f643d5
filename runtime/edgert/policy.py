"""Pure decisions on plain numbers: how many decode steps between chunks, whose chunk, which shape, how many drafts.

Nothing here knows a queue, a clock or a backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgert.cells import Cell

# A waiting prefill is passed over at most this often in a row before it goes first. 3: a long prompt keeps at least a
# quarter of the chunks whatever arrives, and a short one waits for three chunks at worst for each slot.
PATIENCE = 3


@dataclass(frozen=True)
class Ratio:
    """Decode steps after each full prefill chunk while both wait: `base` at a backlog of two chunks, in [low, high]."""

    low: int = 4
    base: int = 6
    high: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.base <= self.high:
            raise ValueError(f"decode steps per chunk: {self.low} <= {self.base} <= {self.high} does not hold")


def decode_steps_per_chunk(backlog_tokens: int, chunk_tokens: int, ratio: Ratio) -> int:
    """r: one step fewer for each chunk of prompt tokens waiting, so that a backlog drains faster."""
    chunks = -(-backlog_tokens // chunk_tokens)
    return min(max(ratio.base + 2 - chunks, ratio.low), ratio.high)


# With fewer than one gap in so many stretched by a chunk, the 95th percentile of a stream's gaps is a plain step.
LATE_ONE_IN = 20


def smooth_steps(rounds: int) -> int:
    """The least r with which fewer than 5 % of a stream's gaps hold a chunk; every `rounds` steps it gets a token.

    Fewer, not as many: at exactly one in twenty a percentile that interpolates takes a share of the long gap.
    """
    return LATE_ONE_IN * rounds + 1


@dataclass(frozen=True)
class PrefillCandidate:
    """remaining, passed_over: as in requests.Prefilling. arrival: smaller came first."""

    slot: int
    remaining: int
    passed_over: int
    arrival: int


def choose_prefill(candidates: Sequence[PrefillCandidate], *, patience: int = PATIENCE) -> PrefillCandidate:
    """Shortest remaining prompt first, but whoever was passed over `patience` times goes before that, oldest first.

    With n prompts in slots nobody waits for more than patience + n − 1 chunks of others in a row.
    """
    starving = [each for each in candidates if each.passed_over >= patience]
    if starving:
        return max(starving, key=lambda each: (each.passed_over, -each.arrival))
    return min(candidates, key=lambda each: (each.remaining, each.arrival))


def choose_prefill_cell(cells: Iterable[Cell], start: int, remaining: int, most_rows: int | None = None) -> Cell | None:
    """The largest chunk while it is filled, then the smallest that holds the tail; the smallest tier that serves it.

    A tier serves a chunk when it covers the real rows (padding is never read). None: no cell reaches position `start`.
    most_rows: chunks larger than this are left out where a smaller one serves.
    """
    usable = [
        cell for cell in cells if cell.kind == "prefill" and cell.kv_tier >= start + min(cell.query_rows, remaining)
    ]
    if not usable:
        return None
    if most_rows is not None:
        usable = [cell for cell in usable if cell.query_rows <= most_rows] or [min(usable, key=_rows)]
    largest = max(cell.query_rows for cell in usable)
    enough = [cell.query_rows for cell in usable if cell.query_rows >= remaining]
    rows = largest if remaining >= largest else min(enough)
    return min((cell for cell in usable if cell.query_rows == rows), key=lambda cell: cell.kv_tier)


def _rows(cell: Cell) -> int:
    return cell.query_rows


@dataclass(frozen=True)
class DecodeCandidate:
    """One decoding sequence. length: positions committed before this step; last_launch: number of its latest launch."""

    slot: int
    length: int
    rows: int
    last_launch: int


@dataclass(frozen=True)
class Window:
    """A decode shape, where it lies (batch row b is slot first_slot + b), and the slots that take part."""

    cell: Cell
    first_slot: int
    slots: tuple[int, ...]


def choose_decode_window(
    cells: Iterable[Cell], candidates: Sequence[DecodeCandidate], *, slots: int, any_first_slot: bool
) -> Window | None:
    """The window that serves most sequences, the longest unserved one among them; of those the cheapest.

    slots           slots allocated: a window stays below
    any_first_slot  False: only batch 1 may start anywhere, larger windows start at slot 0
    Cheapest: fewest batch rows, then the smallest tier, then the fewest query rows. A sequence inside the window that
    the tier or the rows do not serve stays idle and is the longest unserved one soon. None: no cell serves that one.
    """
    due = min(candidates, key=lambda each: (each.last_launch, each.slot))
    everyone = -len(candidates)
    best: tuple[tuple[int, ...], Window] | None = None
    for cell in cells:
        if cell.kind != "decode" or cell.batch > slots:
            continue
        rows, tier, batch = cell.query_rows, cell.kv_tier, cell.batch
        if due.rows > rows or due.length + due.rows > tier:
            continue
        if best is not None and best[0][0] == everyone and best[0][1:4] <= (batch, tier, rows):
            continue  # nobody is left out by what was found, and it is cheaper
        last = slots - batch if any_first_slot or batch == 1 else 0
        for first in range(max(0, due.slot - batch + 1), min(last, due.slot) + 1):
            served = [
                each.slot
                for each in candidates
                if first <= each.slot < first + batch and each.rows <= rows and each.length + each.rows <= tier
            ]
            key = (-len(served), batch, tier, rows, first)
            if best is None or key < best[0]:
                best = (key, Window(cell, first, tuple(sorted(served))))
    return best[1] if best else None


# A draft length is left for another only when that one promises this much more: measured rates waver by a few percent.
DRAFT_MARGIN = 0.05


def choose_drafts(
    acceptance: Sequence[float],
    step_cost_ms: Sequence[float],
    current: int,
    *,
    threshold: float = 0.0,
    margin: float = DRAFT_MARGIN,
) -> int:
    """The draft length with most expected tokens per ms, with hysteresis around `current`.

    acceptance    [K] by position, given the one before; step_cost_ms [K + 1] of a step with k drafts, drafting included
    A step with k drafts yields 1 + a_1 + a_1·a_2 + ... + a_1···a_k tokens. Positions from the first one below
    `threshold` on are not drafted.
    """
    rates = []
    tokens = reach = 1.0
    for length, cost_ms in enumerate(step_cost_ms):
        if length:
            if acceptance[length - 1] < threshold:
                break
            reach *= acceptance[length - 1]
            tokens += reach
        rates.append(tokens / cost_ms)
    best = max(range(len(rates)), key=lambda length: (rates[length], -length))
    if current < len(rates) and rates[best] <= rates[current] * (1 + margin):
        return current
    return best
