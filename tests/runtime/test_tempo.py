"""The tempo by property: bounded, steady, and what it promises about gaps, heat and pressure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from edgert.cells import Cell
from edgert.costs import StepCosts
from edgert.policy import Ratio, smooth_steps
from edgert.tempo import GAP_MARGIN, LEAST_SPEED, Load, Rules, Targets, Tempo, decide, first_tempo, owed
from hypothesis import given
from hypothesis import strategies as st

CHUNKS = (16, 64, 128, 512)
TIERS = (512, 2048)


def table(launch_ms: float, row_ms: float, draft_ms: float = 0.5) -> StepCosts:
    cells = {Cell("prefill", 1, rows, tier): (launch_ms + row_ms * rows * (1 + tier / 8192),)
             for rows in CHUNKS for tier in TIERS}  # fmt: skip
    for batch in (1, 2, 4):
        for tier in TIERS:
            plain = launch_ms + batch * (0.2 + tier / 4096)
            cells[Cell("decode", batch, 1, tier)] = tuple(plain + k * draft_ms * batch for k in range(4))
    return StepCosts("measured", "made up", "fake", "1", "", "tier", 0, 0.0, cells)


costs_strategy = st.one_of(st.none(), st.builds(table, st.floats(0.5, 50), st.floats(0.01, 2)))
targets_strategy = st.builds(
    Targets,
    st.one_of(st.none(), st.floats(1, 10_000)),
    st.one_of(st.none(), st.floats(1, 2000)),
    st.one_of(st.none(), st.none(), st.floats(1, 20)),
    st.one_of(st.none(), st.floats(0.5, 400)),
)
rules_strategy = st.builds(
    Rules,
    chunks=st.just(CHUNKS),
    batches=st.sampled_from([(1, 2, 4), (1,), (1, 2)]),
    adaptive=st.sampled_from([True, True, True, False]),
    ratio=st.sampled_from([Ratio(), Ratio(1, 2, 3), Ratio(5, 5, 5)]),
    draft_length=st.integers(0, 3),
    costs=costs_strategy,
    targets=targets_strategy,
)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    slots = draw(st.integers(1, 8))
    prefilling = draw(st.integers(0, slots))
    remaining = draw(st.integers(1, 2048)) if prefilling else 0
    return Load(
        decoding=draw(st.integers(0, slots - prefilling)),
        prefilling=prefilling,
        waiting=draw(st.integers(0, 5)),
        backlog_tokens=remaining * prefilling + draw(st.integers(0, 5000)),
        oldest_ms=draw(st.floats(0, 20_000)),
        remaining=remaining,
        prompt_end=draw(st.integers(0, 2048)),
        length=draw(st.integers(0, 2048)),
        slots=slots,
        active_slots=draw(st.integers(1, slots)),
        tokens_per_step=draw(st.sampled_from([1.0, 1.0, 1.3, 2.6, 4.0])),
    )


tempos = st.builds(Tempo, st.sampled_from(CHUNKS), st.integers(1, 8), st.integers(0, 3), st.booleans())


@given(rules_strategy, loads(), tempos)
def test_a_decision_stays_within_what_is_captured_and_configured_and_stands(
    rules: Rules, load: Load, before: Tempo
) -> None:
    tempo = decide(rules, load, before)
    assert tempo.chunk_rows in CHUNKS
    assert rules.ratio.low <= tempo.steps <= rules.ratio.base
    assert min(1, rules.draft_length) <= tempo.drafts <= rules.draft_length
    assert decide(rules, load, tempo) == tempo
    for rows in (0, *CHUNKS):
        due = owed(rules, tempo, rows, load)
        most = max(rules.rounds(load.decoding), tempo.steps)
        if rules.adaptive and rules.targets.itl_p95_ratio is not None:
            most = max(most, smooth_steps(rules.rounds(load.decoding)))
        assert rules.rounds(load.decoding) <= due <= most
    if not rules.adaptive:
        assert tempo == Tempo(CHUNKS[-1], rules.ratio.base, rules.draft_length)


@given(rules_strategy, loads(), tempos)
def test_the_largest_chunk_runs_where_nothing_decodes_and_the_device_is_cool(
    rules: Rules, load: Load, before: Tempo
) -> None:
    cool = replace(load, active_slots=load.slots, decoding=0)
    assert decide(rules, cool, before).chunk_rows == CHUNKS[-1]


@given(rules_strategy, loads(), tempos)
def test_a_gap_target_is_kept_by_the_largest_chunk_that_keeps_it_unless_that_one_is_too_slow(
    rules: Rules, load: Load, before: Tempo
) -> None:
    target = rules.targets.itl_ms
    step = rules.decode_ms(load.decoding, load.length)
    whole = rules.chunk_ms(CHUNKS[-1], load.prompt_end)
    if not rules.adaptive or target is None or step is None or whole is None or not load.decoding * load.prefilling:
        return
    rules = replace(rules, targets=Targets(None, target, None, rules.targets.tpot_ms))
    tempo = decide(rules, replace(load, active_slots=load.slots), before)
    parts = {rows: rules.chunk_ms(rows, load.prompt_end) or 0.0 for rows in CHUNKS}
    keeping = [rows for rows in CHUNKS if parts[rows] + step <= target * GAP_MARGIN]
    if keeping and whole / CHUNKS[-1] >= LEAST_SPEED * parts[keeping[-1]] / keeping[-1]:
        assert parts[tempo.chunk_rows] + step <= target
    if parts[tempo.chunk_rows] + step <= target and tempo.drafts > 1:
        drafted = rules.decode_ms(load.decoding, load.length, tempo.drafts)
        assert drafted is not None
        assert parts[tempo.chunk_rows] + drafted <= target


def test_a_gap_target_that_no_chunk_keeps_costs_no_first_token_anything() -> None:
    rules = Rules(CHUNKS, costs=table(1.0, 0.1), ratio=Ratio(4, 6, 8), targets=Targets(None, 1.0))
    load = Load(decoding=1, prefilling=1, backlog_tokens=2000, remaining=2000, prompt_end=500, length=100)
    assert decide(rules, load, first_tempo(rules)) == decide(
        replace(rules, targets=Targets()), load, first_tempo(rules)
    )


def test_a_late_first_token_goes_before_the_gap() -> None:
    costs = table(20.0, 0.1)  # small chunks are dear here
    load = Load(decoding=1, prefilling=1, backlog_tokens=2000, remaining=2000, prompt_end=500, length=100)
    rules = Rules(CHUNKS, costs=costs, ratio=Ratio(4, 6, 8), targets=Targets(10_000.0, 60.0))
    assert decide(rules, load, first_tempo(rules)).chunk_rows == 128
    assert decide(rules, replace(load, oldest_ms=9000.0), first_tempo(rules)).chunk_rows == 512


@given(rules_strategy, loads(), tempos)
def test_heat_never_means_larger_chunks_or_more_drafts(rules: Rules, load: Load, before: Tempo) -> None:
    calm = Targets(rules.targets.ttft_ms, None)
    before = replace(before, chunk_rows=CHUNKS[-1])
    idle = replace(load, decoding=0)
    sizes = []
    for active in range(1, load.slots + 1):
        tempo = decide(replace(rules, targets=calm), replace(idle, active_slots=active), before)
        sizes.append((tempo.chunk_rows, tempo.drafts))
    assert sizes == sorted(sizes)


@given(rules_strategy, loads(), tempos, st.integers(0, 5000))
def test_more_pressure_never_means_more_decode_steps(rules: Rules, load: Load, before: Tempo, more: int) -> None:
    busier = replace(load, backlog_tokens=load.backlog_tokens + more, waiting=load.waiting + bool(more))
    calm, busy = decide(rules, load, before), decide(rules, busier, before)
    if load.decoding and load.prefilling:
        assert busy.steps <= calm.steps
    assert busy.pressed or not calm.pressed


def test_a_chunk_grows_again_only_with_room_to_spare() -> None:
    costs = table(1.0, 0.1)
    load = Load(decoding=1, prefilling=1, backlog_tokens=4000, remaining=4000, prompt_end=500, length=100)
    rules = Rules(CHUNKS, costs=costs, ratio=Ratio(8, 8, 8))
    whole, step = rules.chunk_ms(512, 500), rules.decode_ms(1, 100)
    assert whole is not None
    assert step is not None
    near = replace(rules, targets=Targets(None, (whole + step) * 1.01))
    assert decide(near, load, Tempo(512, 8, 0)).chunk_rows == 512
    assert decide(near, load, Tempo(128, 8, 0)).chunk_rows == 128
    wide = replace(rules, targets=Targets(None, (whole + step) * 1.2))
    assert decide(wide, load, Tempo(128, 8, 0)).chunk_rows == 512


def test_pressure_ends_well_below_where_it_began() -> None:
    rules = Rules(CHUNKS, costs=table(1.0, 0.1), targets=Targets(1000.0, None))
    late = Load(decoding=1, prefilling=1, backlog_tokens=100, remaining=100, prompt_end=100, length=100, oldest_ms=1200)
    pressed = decide(rules, late, first_tempo(rules))
    assert pressed.pressed
    assert pressed.steps == rules.ratio.low
    easier = replace(late, oldest_ms=700.0)
    assert decide(rules, easier, pressed).pressed
    assert not decide(rules, easier, first_tempo(rules)).pressed
    assert not decide(rules, replace(late, oldest_ms=300.0), pressed).pressed


@pytest.mark.parametrize(("rows", "steps"), [(512, 8), (128, 2), (16, 1), (0, 8)])
def test_a_small_chunk_owes_its_share_of_the_steps(rows: int, steps: int) -> None:
    rules = Rules(CHUNKS, batches=(1, 2, 4), ratio=Ratio(4, 8, 8))
    assert owed(rules, Tempo(512, 8, 0), rows, Load(decoding=3)) == steps
    assert owed(replace(rules, adaptive=False), Tempo(512, 8, 0), rows, Load(decoding=3)) == 8


@pytest.mark.parametrize(("gained", "steps"), [(1.0, 8), (1.6, 5), (2.5, 3), (9.0, 1)])
def test_accepted_drafts_are_tokens_so_fewer_steps_are_owed(gained: float, steps: int) -> None:
    rules = Rules((128, 512), (4,), ratio=Ratio(4, 8, 8), draft_length=3)
    load = Load(decoding=3, tokens_per_step=gained)
    assert owed(rules, Tempo(512, 8, 3), 512, load) == steps
    assert owed(replace(rules, adaptive=False), Tempo(512, 8, 3), 512, load) == 8
    smooth = replace(rules, targets=Targets(itl_p95_ratio=1.5))  # is counted in gaps, whatever comes in each
    assert owed(smooth, Tempo(512, 8, 3), 512, load) >= 20


def test_streams_that_do_not_fit_into_one_batch_each_get_a_step() -> None:
    rules = Rules(CHUNKS, batches=(1,), ratio=Ratio(1, 1, 1))
    assert owed(rules, first_tempo(rules), 16, Load(decoding=5)) == 5


@given(rules_strategy, loads(), tempos, st.floats(1, 20))
def test_a_chunk_past_the_p95_ratio_is_followed_by_20_plain_gaps_of_every_stream(
    rules: Rules, load: Load, before: Tempo, ratio: float
) -> None:
    if not load.decoding:
        return
    rules = replace(rules, adaptive=True, targets=replace(rules.targets, itl_p95_ratio=ratio))
    tempo = decide(rules, load, before)
    rounds = rules.rounds(load.decoding)
    step = rules.decode_ms(load.decoding, load.length)
    for rows in CHUNKS:
        chunk, due = rules.chunk_ms(rows, load.prompt_end), owed(rules, tempo, rows, load)
        if chunk is None or step is None or chunk + rounds * step > ratio * rounds * step:
            assert due >= max(tempo.steps, 20 * rounds + 1)
        else:
            plain = replace(rules, targets=replace(rules.targets, itl_p95_ratio=None))
            assert due == owed(plain, tempo, rows, load)


@given(rules_strategy, loads(), tempos, st.floats(0.5, 400))
def test_pressure_takes_no_more_steps_than_the_time_per_token_allows(
    rules: Rules, load: Load, before: Tempo, target: float
) -> None:
    if not load.decoding * load.prefilling:
        return
    rules = replace(rules, adaptive=True, targets=replace(rules.targets, tpot_ms=target, itl_p95_ratio=None))
    tempo = decide(rules, load, before)
    free = decide(replace(rules, targets=replace(rules.targets, tpot_ms=None)), load, before)
    assert tempo.steps >= free.steps or tempo.chunk_rows != free.chunk_rows
    step, whole = rules.decode_ms(load.decoding, load.length), rules.chunk_ms(CHUNKS[-1], load.prompt_end)
    if step is None or whole is None:
        assert tempo == free
        return
    rounds = rules.rounds(load.decoding)

    def token_ms(steps: int) -> float:
        return rounds * (step + whole / max(rounds, steps))

    assert token_ms(tempo.steps) <= target or tempo.steps == rules.ratio.base
    if tempo.steps > max(free.steps, rules.ratio.low):  # no more than is needed, but for the margin
        assert token_ms(tempo.steps - 1) > target * GAP_MARGIN


def test_steps_are_taken_away_again_only_with_room_to_spare() -> None:
    costs = table(1.0, 0.1)
    load = Load(decoding=1, prefilling=1, waiting=1, backlog_tokens=2000, remaining=2000, prompt_end=500, length=100)
    free = Rules(CHUNKS, costs=costs, ratio=Ratio(4, 6, 8))
    step, whole = free.decode_ms(1, 100), free.chunk_ms(512, 500)
    assert step is not None
    assert whole is not None
    before = first_tempo(free)
    assert decide(free, load, before).steps == 4

    def steps(target: float, last: int) -> int:
        rules = replace(free, targets=Targets(tpot_ms=target))
        return decide(rules, load, replace(before, steps=last)).steps

    just_four = (step + whole / 4) * 1.001
    assert steps(just_four, 4) == 4
    assert steps(just_four, 6) == 5
    assert steps(just_four / GAP_MARGIN, 6) == 4
    assert steps(step, 4) == 6  # nothing keeps it: then as many as without pressure
