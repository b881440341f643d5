"""How prefill and decode share the device now: one pure function from the load and the guards to a Tempo.

    tempo = decide(rules, load, before)

Chunk size, decode steps after a chunk and draft length come from here and nowhere else; the worker and the simulator
both ask it. `before` is the whole memory: a decision is left only when the load has moved past a margin, and the same
load asked twice gives the same answer. It knows no queue, no clock and no device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edgert.costs import StepCosts
from edgert.policy import Ratio, decode_steps_per_chunk, smooth_steps

# A chunk is made larger again only when the gap then stays this far below its target, and so for fewer steps and TPOT.
GAP_MARGIN = 0.9
# Pressure begins where the time to the first token is predicted to reach this share of its target, and ends below that.
PRESSED_FROM, PRESSED_UNTIL = 1.0, 0.5
# A smaller chunk may put the next prompt's first token off by this share; for that the gap shrinks.
FINER = 0.01
# A chunk is made smaller for the gap's sake while it prefills at this share of the largest one's speed or more, and
# first tokens are on time all the same; those that are late are put off by this share at most, against fixed chunks.
LEAST_SPEED = 0.5
PUT_OFF = 0.2


@dataclass(frozen=True)
class Targets:
    """Latencies to keep, None = none.

    itl_ms          the longest gap between two tokens of a stream
    itl_p95_ratio   the 95th percentile of a stream's gaps while prompts are read, against a plain step
    tpot_ms         time per token of a stream while prompts are read; bounds how far pressure takes steps away
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    itl_p95_ratio: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True)
class Rules:
    """What does not change while the engine runs.

    adaptive      False: the largest chunk, `ratio.base` decode steps after every chunk, every draft
    chunks        captured chunk sizes that may be used, ascending
    batches       captured decode batch sizes, ascending
    rows          query rows of a decode step without drafts
    draft_length  drafts a step at most
    costs         None: nothing is known of times; then rows stand for them, and the gap's target is not looked at
    """

    chunks: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    rows: int = 1
    adaptive: bool = True
    ratio: Ratio = field(default_factory=Ratio)
    draft_length: int = 0
    costs: StepCosts | None = None
    targets: Targets = field(default_factory=Targets)

    def chunk_ms(self, rows: int, end: int) -> float | None:
        """A chunk of `rows` that ends at position `end`; None = unknown."""
        return None if self.costs is None else self.costs.shape_ms("prefill", 1, rows, end)

    def decode_ms(self, streams: int, length: int, drafts: int = 0) -> float | None:
        """One decode step for `streams` sequences, or as many as fit into a batch; None = unknown."""
        if self.costs is None:
            return None
        batch = next((size for size in self.batches if size >= streams), self.batches[-1])
        return self.costs.shape_ms("decode", batch, self.rows, length, drafts)

    def rounds(self, streams: int) -> int:
        """Decode steps that give every one of `streams` sequences a token."""
        return max(1, -(-streams // self.batches[-1]))


@dataclass(frozen=True)
class Load:
    """What is going on, in numbers.

    decoding, prefilling, waiting   requests that yield tokens, that read their prompt, and that have no slot
    backlog_tokens   prompt tokens that are not launched, of requests with and without a slot
    oldest_ms        how long ago the oldest request without a first token arrived
    remaining        prompt tokens to go of the prompt that is nearest to its end
    prompt_end       position where a chunk of the largest size would end in the prompt that is furthest
    length           positions of the longest decoding sequence
    slots, active_slots   slots for sequences, and those that the guards let be active
    tokens_per_step  that a decoding sequence gets from a step lately; more than 1 where drafts are accepted
    """

    decoding: int = 0
    prefilling: int = 0
    waiting: int = 0
    backlog_tokens: int = 0
    oldest_ms: float = 0.0
    remaining: int = 0
    prompt_end: int = 0
    length: int = 0
    slots: int = 1
    active_slots: int = 1
    tokens_per_step: float = 1.0


@dataclass(frozen=True)
class Tempo:
    """The decision.

    chunk_rows   the largest chunk that may be launched
    steps        decode steps owed after a chunk of the largest size; a smaller one owes its share (`owed`)
    drafts       drafts a step at most
    pressed      first tokens are late, or requests wait for a slot: prefill goes first
    """

    chunk_rows: int
    steps: int
    drafts: int
    pressed: bool = False


def first_tempo(rules: Rules) -> Tempo:
    """Before there is any load."""
    return Tempo(rules.chunks[-1], rules.ratio.base, rules.draft_length)


def decide(rules: Rules, load: Load, before: Tempo) -> Tempo:
    """The tempo for this load. Pure; decide(rules, load, decide(rules, load, x)) == decide(rules, load, x)."""
    if not rules.adaptive:
        return first_tempo(rules)
    drafts = _cooled(rules.draft_length, load)
    largest = max((c for c in rules.chunks if c <= _cooled(rules.chunks[-1], load)), default=rules.chunks[0])
    pressed = _pressed(rules, load, before.pressed)
    if not load.decoding or not load.prefilling:
        return Tempo(largest, rules.ratio.base, drafts, pressed)
    least = _least_steps(rules, load, before)
    steps = max(least, _steps(rules, load, pressed))
    rows, cut = _chunk(rules, load, before, largest, steps, pressed)
    if cut:  # smaller chunks than the prompt would like: fewer steps between them make up for it
        steps = least
    if rules.targets.itl_ms is not None:
        drafts = _drafts_within(rules, load, rows, drafts)
    return Tempo(rows, steps, drafts, pressed)


def owed(rules: Rules, tempo: Tempo, chunk_rows: int, load: Load) -> int:
    """Decode steps due after a chunk of `chunk_rows` (0 = none yet): its share of those of a full chunk, by its time.

    At least one for every decoding stream, so that the longest gap is one chunk and one step. What is owed is a token a
    step: steps whose drafts are accepted are fewer. A chunk that stretches a gap past itl_p95_ratio owes all of them
    whatever its size, and so many that such gaps stay below one in twenty.
    """
    if not rules.adaptive or not chunk_rows:
        return max(rules.rounds(load.decoding), tempo.steps)
    return _owed(rules, tempo.steps, chunk_rows, load)


def _owed(rules: Rules, steps: int, chunk_rows: int, load: Load) -> int:
    largest = rules.chunks[-1]
    if _rough(rules, load, chunk_rows):
        return max(steps, smooth_steps(rules.rounds(load.decoding)))
    part, whole = (rules.chunk_ms(rows, load.prompt_end) for rows in (chunk_rows, largest))
    share = chunk_rows / largest if part is None or not whole else part / whole
    return max(rules.rounds(load.decoding), round(steps * min(1.0, share) / max(1.0, load.tokens_per_step)))


def _rough(rules: Rules, load: Load, chunk_rows: int) -> bool:
    """Whether a gap with this chunk in it is past itl_p95_ratio; what is not known is."""
    ratio = rules.targets.itl_p95_ratio
    if ratio is None:
        return False
    part, step = rules.chunk_ms(chunk_rows, load.prompt_end), rules.decode_ms(load.decoding, load.length)
    if part is None or step is None:
        return True
    quiet = rules.rounds(load.decoding) * step
    return part + quiet > ratio * quiet


def _least_steps(rules: Rules, load: Load, before: Tempo) -> int:
    """The fewest steps a full chunk that keep tpot_ms, fewer than before only with room to spare; `ratio.base` where
    none keep it. Drafts are not counted: what they bring is on top."""
    target, low, base = rules.targets.tpot_ms, rules.ratio.low, rules.ratio.base
    whole, step = rules.chunk_ms(rules.chunks[-1], load.prompt_end), rules.decode_ms(load.decoding, load.length)
    if target is None or whole is None or step is None:
        return low
    rounds = rules.rounds(load.decoding)
    for steps in range(low, base):
        token_ms = rounds * (step + whole / max(rounds, steps))
        if token_ms <= target * (1.0 if steps >= before.steps else GAP_MARGIN):
            return steps
    return base


def _cooled(value: int, load: Load) -> int:
    """A number scaled down as the guards take slots away, not below 1; whole while they do not."""
    return value if load.active_slots >= load.slots else max(min(value, 1), value * load.active_slots // load.slots)


def _pressed(rules: Rules, load: Load, before: bool) -> bool:
    if not load.prefilling:
        return False
    if load.waiting:
        return True
    if rules.targets.ttft_ms is None:
        return before and load.backlog_tokens > rules.chunks[-1]
    due_ms = _first_token_ms(rules, load, rules.chunks[-1], rules.ratio.base)
    return due_ms >= rules.targets.ttft_ms * (PRESSED_UNTIL if before else PRESSED_FROM)


def _first_token_ms(rules: Rules, load: Load, rows: int, steps: int) -> float:
    """When the oldest request's first token is due, from its arrival, if the backlog is read in chunks of `rows`."""
    chunk, step = rules.chunk_ms(rows, load.prompt_end), rules.decode_ms(load.decoding, load.length)
    if chunk is None or step is None:
        return load.oldest_ms
    between = _owed(rules, steps, rows, load) * step if load.decoding else 0.0
    return load.oldest_ms + load.backlog_tokens / rows * (chunk + between)


def _steps(rules: Rules, load: Load, pressed: bool) -> int:
    if pressed:
        return rules.ratio.low
    return min(rules.ratio.base, decode_steps_per_chunk(load.backlog_tokens, rules.chunks[-1], rules.ratio))


def _chunk(rules: Rules, load: Load, before: Tempo, largest: int, steps: int, pressed: bool) -> tuple[int, bool]:
    """While streams decode: the finest chunk that costs next to nothing, and one that keeps the gap's target.

    The second value: the target made it smaller.
    """
    step = rules.decode_ms(load.decoding, load.length)
    whole = rules.chunk_ms(largest, load.prompt_end)
    if step is None or whole is None:
        return largest, False
    rows = largest
    if not pressed:
        allowed = _read_ms(rules, load, largest, steps, step) * (1 + FINER)
        rows = next(
            size for size in rules.chunks if size == largest or _read_ms(rules, load, size, steps, step) <= allowed
        )
    if rules.targets.itl_ms is None:
        return rows, False
    within = _within_gap(rules, load, before, rows, step)
    return within, within < rows


def _read_ms(rules: Rules, load: Load, rows: int, steps: int, step_ms: float) -> float:
    """Until the next prompt is read in chunks of `rows` and a smaller one for its tail, with the steps owed between."""
    full, tail = divmod(load.remaining, rows)
    chunk = rules.chunk_ms(rows, load.prompt_end) or 0.0
    last = next(size for size in rules.chunks if size >= tail) if tail else 0
    last_ms = rules.chunk_ms(last, load.prompt_end) or 0.0 if last else 0.0
    between = full if tail else full - 1
    return full * chunk + last_ms + max(0, between) * _owed(rules, steps, rows, load) * step_ms


def _within_gap(rules: Rules, load: Load, before: Tempo, rows: int, step_ms: float) -> int:
    """The largest chunk that keeps the gap's target at a bearable price; `rows` where there is none."""
    target = rules.targets.itl_ms or 0.0
    for size in reversed(rules.chunks):
        part = rules.chunk_ms(size, load.prompt_end)
        if size > rows or part is None:
            continue
        if part + step_ms <= target * (1.0 if size <= before.chunk_rows else GAP_MARGIN):
            return size if size == rows or _bearable(rules, load, size, part, step_ms) else rows
    return rows


def _bearable(rules: Rules, load: Load, rows: int, chunk_ms: float, step_ms: float) -> bool:
    """Whether prefill in chunks of `rows`, with `ratio.low` steps between them, is quick enough for first tokens."""
    largest, low = rules.chunks[-1], rules.ratio.low
    whole = rules.chunk_ms(largest, load.prompt_end) or chunk_ms
    if whole / largest < LEAST_SPEED * chunk_ms / rows:
        return False
    ttft_ms = rules.targets.ttft_ms
    if ttft_ms is None or _first_token_ms(rules, load, rows, low) <= ttft_ms:
        return True
    as_fixed = _read_ms(rules, load, largest, rules.ratio.base, step_ms)
    return _read_ms(rules, load, rows, low, step_ms) <= (1 + PUT_OFF) * as_fixed


def _drafts_within(rules: Rules, load: Load, rows: int, most: int) -> int:
    """Drafts lengthen the step that ends a gap: as many as the target leaves room for, and one at least.

    One: the drafter loses a sequence for good when it does not see a step. All, where the target cannot be kept.
    """
    chunk, target = rules.chunk_ms(rows, load.prompt_end), rules.targets.itl_ms or 0.0

    def fits(drafts: int) -> bool:
        step = rules.decode_ms(load.decoding, load.length, drafts)
        return chunk is None or step is None or chunk + step <= target

    return next((drafts for drafts in range(most, 0, -1) if fits(drafts)), min(most, 1) if fits(0) else most)
