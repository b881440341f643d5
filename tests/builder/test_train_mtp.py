"""Training of the drafter on a toy: text, unrolled passes, acceptance, resuming."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import toys
from click.testing import CliRunner
from edgebuild.checkpoint import open_checkpoint
from edgebuild.cli import cli
from edgebuild.drafter import find_drafter
from edgebuild.errors import CheckpointError, OutputError, TrafficError
from edgebuild.models.config import ModelConfig
from edgebuild.train.acceptance import Acceptance, count_steps, walked
from edgebuild.train.forward import load_frozen, new_cache, one_more, whole
from edgebuild.train.generate import Sample, encode_prompts, generate, go_on, pack, together, unpack
from edgebuild.train.learner import Learner, Recipe, start_module
from edgebuild.train.lesson import chain_loss, lesson
from edgebuild.train.optimise import orthogonal
from edgebuild.train.progress import Settings
from edgebuild.train.prompts import TASKS, Prompt, built_in, names_held_out, openings, read_prompts, split_own
from edgebuild.train.store import Order
from edgebuild.train.trainer import guessed_rows, train
from edgebuild.train.unroll import Batch, correct_guesses, unroll
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from toy_mtp import NaiveMtp

CPU = torch.device("cpu")
PROMPTS = [Prompt(task, f"{task} number {n}") for n in range(6) for task in ("chat", "code")]
HELD_OUT = [Prompt(task, f"{task} other {n}") for n in range(4) for task in ("chat", "code")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied: what comes next is not what came before."""
    return toys.make_qwen3(tmp_path_factory.mktemp("train") / "qwen3", tied=False)


def settings(**changes: object) -> Settings:
    fixed = {"steps": 60, "max_tokens": 32, "longest_prompt": 64, "batch": 8, "gen_batch": 8, "temperatures": (0.0,)}
    return Settings(**fixed | changes)  # type: ignore[arg-type]


def test_built_in_prompts_are_many_and_different_and_what_is_held_out_is_not_trained_on() -> None:
    train_prompts = built_in("train", 400)
    assert {prompt.task for prompt in train_prompts} == set(TASKS)
    assert len(set(train_prompts)) == len(train_prompts) >= 1500
    assert built_in("train", 400) == train_prompts
    for part in ("held_out", "new"):
        assert not {p.text for p in built_in(part, 40)} & {p.text for p in built_in("train", 3000)}
    assert "{" not in "".join(p.text for p in train_prompts if p.task in ("chat", "story", "extraction"))


def test_own_prompts_are_read_as_text_and_as_json_and_some_are_held_out(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('What is a tier?\n\n{"prompt": "Say hello.", "task": "chat"}\nAnother one\n')
    prompts = read_prompts(file)
    assert prompts == [Prompt("own", "What is a tier?"), Prompt("chat", "Say hello."), Prompt("own", "Another one")]
    kept, held = split_own(prompts)
    assert len(held) == 1
    assert sorted(p.text for p in kept + held) == sorted(p.text for p in prompts)
    file.write_text('{"prompt": 3}\n')
    with pytest.raises(TrafficError, match=r"prompts\.txt:1: no prompt"):
        read_prompts(file)
    file.write_text("only one\n")
    with pytest.raises(TrafficError, match="1 prompts"):
        read_prompts(file)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_batched_generation_equals_one_pass_over_each_sequence(family: str, tmp_path: Path) -> None:
    maker = {"llama": toys.make_llama, "qwen2": toys.make_qwen2, "qwen3": toys.make_qwen3}[family]
    checkpoint = open_checkpoint(maker(tmp_path))
    decoder = load_frozen(checkpoint, 128, CPU, torch.float32)
    prompts = encode_prompts(checkpoint, PROMPTS[:5], 64)
    samples = generate(decoder, prompts, temperature=0.0, max_tokens=20, eos=(), batch=3, seed=0)
    for prompt, sample in zip(prompts, samples, strict=True):
        assert sample.ids[: sample.start] == prompt.ids
        hidden = whole(decoder, torch.tensor([sample.ids]))
        best = decoder.head(hidden)[0, :, : decoder.token_limit].argmax(-1)
        assert best[sample.start - 1 : -1].tolist() == list(sample.ids[sample.start :])


def test_the_cache_holds_what_one_pass_computes(model: Path) -> None:
    decoder = load_frozen(open_checkpoint(model), 64, CPU, torch.float32)
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    cache = new_cache(decoder, 2, 32)
    whole(decoder, ids[:, :7], cache)
    for position in range(7, 12):
        hidden = one_more(decoder, ids[:, position], torch.tensor([position] * 2), cache, 32)
    assert torch.allclose(hidden, whole(decoder, ids)[:, -1], atol=1e-4)


def test_an_answer_ends_at_an_end_token_after_the_prompt_and_not_inside_it(model: Path) -> None:
    """Chat prompts hold end-of-turn tokens: cutting there would leave prompts to train on, and no answers."""
    checkpoint = open_checkpoint(model)
    decoder = load_frozen(checkpoint, 128, CPU, torch.float32)
    prompts = encode_prompts(checkpoint, PROMPTS[:3], 64)
    assert all(toys.IM_END in prompt.ids for prompt in prompts)
    free = generate(decoder, prompts, temperature=0.0, max_tokens=20, eos=(), batch=8, seed=0)
    end = free[0].ids[free[0].start + 4]
    cut = generate(decoder, prompts, temperature=0.0, max_tokens=20, eos=(end, toys.IM_END), batch=8, seed=0)
    for sample in cut:
        answer = sample.ids[sample.start :]
        assert answer
        assert not set(answer[:-1]) & {end, toys.IM_END}


def test_unrolled_passes_equal_the_naive_module_in_a_chain(model: Path) -> None:
    decoder = load_frozen(open_checkpoint(model), 64, CPU, torch.float32)
    mtp = start_module(decoder)
    naive = NaiveMtp(model, {f"mtp.{name}": value.detach() for name, value in mtp.named_parameters()})
    ids = torch.randint(3, 300, (1, 10), generator=torch.Generator().manual_seed(1))
    hidden = whole(decoder, ids)
    batch = Batch(ids, hidden, torch.tensor([3]), torch.tensor([10]))
    passes = [rows.detach().double().numpy()[0] for rows in unroll(mtp, decoder, batch, 3)]
    for place in range(5):
        tokens, states = ids[0].tolist(), hidden[0].double().numpy()
        rows = [(naive.embedding[tokens[p + 1]], states[p]) for p in range(place + 1)]
        for turn in range(3):
            expected = naive.rows(rows)[-1]
            assert abs(passes[turn][place] - expected).max() < 1e-3, (place, turn)
            rows.append((naive.embedding[tokens[place + turn + 2]], expected))
    (correct,) = correct_guesses(mtp, decoder, batch, 3)
    assert correct.shape == (3, 1, 10)
    assert not correct[:, 0, :2].any()  # nothing is drafted inside the prompt


def counted(passes: list[list[bool]], start: int, length: int) -> Acceptance:
    return count_steps(torch.tensor(passes)[:, None], torch.tensor([start]), torch.tensor([length]))[0]


def test_acceptance_counts_steps_of_accepted_tokens_and_one_more() -> None:
    right, wrong = [True] * 12, [False] * 12
    full = counted([right, right, right], start=1, length=12)
    assert (full.reached, full.accepted, full.tokens, full.steps) == ((2, 2, 2), (2, 2, 2), 8, 2)
    none = counted([wrong, right, right], start=1, length=12)
    assert (none.rates, none.mean_length) == ((0.0, 0.0, 0.0), 1.0)
    assert counted([right, wrong, right], start=1, length=12).mean_length == 2.0


def test_sequences_are_written_together_as_far_as_memory_goes(model: Path) -> None:
    decoder = load_frozen(open_checkpoint(model), 64, CPU, torch.float32)
    assert together(decoder, 100, 16) == 16
    many = together(decoder, 100, 10**9)
    assert 16 < many < 10**9
    assert together(decoder, 200, 10**9) == pytest.approx(many / 2, abs=1)
    assert together(decoder, 10**12, 16) == 1


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(2, 40))
@hypothesis_settings(max_examples=60, deadline=None)
def test_all_steps_at_once_come_to_the_same_guesses_as_one_after_the_other(seed: int, depth: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    correct = torch.rand(depth, 3, rows, generator=generator) < 0.6
    first = torch.randint(0, rows, (3,), generator=generator)
    found = walked(correct, first)
    for row in range(3):
        expected = torch.zeros(depth, rows, dtype=torch.bool)
        place = int(first[row])
        while place < rows:
            run = 0
            while run < depth:
                expected[run, place] = True
                if not correct[run, row, place]:
                    break
                run += 1
            place += run + 1
        assert torch.equal(found[:, row], expected)


def test_the_loss_is_the_cross_entropy_of_every_pass_against_the_model_and_so_is_its_gradient(model: Path) -> None:
    decoder = load_frozen(open_checkpoint(model), 64, CPU, torch.float32)
    mtp, table = start_module(decoder, "fresh", 3), decoder.lm_head.weight[:300]
    ids = torch.randint(3, 300, (2, 14), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids, whole(decoder, ids), torch.tensor([5, 4]), torch.tensor([14, 11]))
    learned = lesson(batch, table, 3, 0.5, size=20)
    loss = chain_loss(mtp, decoder, learned, 3)
    loss.total.backward()
    found = mtp.fc.weight.grad.clone()
    mtp.zero_grad()
    terms = []
    for turn, rows in enumerate(unroll(mtp, decoder, batch, 3)):
        for row, (start, length) in enumerate([(5, 14), (4, 11)]):
            for place in range(start, length - 1):
                teacher = (batch.hidden[row, place] @ table.T).softmax(-1)
                aim = (teacher + 0.5 * torch.nn.functional.one_hot(teacher.argmax(), 300)) / 1.5
                terms.append(-(aim * (rows[row, place - turn - 1] @ table.T).log_softmax(-1)).sum())
    expected = torch.stack(terms).mean()
    expected.backward()
    assert torch.allclose(loss.total, expected, atol=1e-5)
    assert torch.allclose(found, mtp.fc.weight.grad, atol=1e-5)
    weighed = chain_loss(mtp, decoder, learned, 3, off_path=0.0).total
    assert torch.isfinite(weighed)
    assert not torch.allclose(weighed, expected)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_one_batch_is_learned_by_either_optimiser_from_either_start(model: Path, optimiser: str) -> None:
    decoder = load_frozen(open_checkpoint(model), 64, CPU, torch.float32)
    ids = torch.randint(3, 300, (4, 20), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids, whole(decoder, ids), torch.tensor([4] * 4), torch.tensor([20] * 4))
    for start in ("copy", "fresh"):
        recipe = Recipe(optimiser=optimiser, start=start, learning_rate=3e-3)  # type: ignore[arg-type]
        learner = Learner(decoder, recipe, guessed_rows(decoder, range(300)), 0)
        losses = []
        for step in range(30):
            learner.learn(batch, 80, 0.0, step)
            losses.append(learner.last[0])
        assert losses[-1] < losses[0] - 0.2, (start, losses[0], losses[-1])


def test_steps_of_muon_are_orthogonal() -> None:
    for shape in ((24, 24), (16, 40), (40, 16)):
        made = orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        singular = torch.linalg.svdvals(made)
        assert float(singular.min()) > 0.5
        assert float(singular.max()) < 1.3


def test_batches_have_few_shapes_and_every_sequence_comes_once_before_any_comes_again() -> None:
    rng = random.Random(0)
    samples = [Sample("chat", tuple(range(rng.randint(10, 300))), 5) for _ in range(100)]
    order = Order(samples, 8, 0)
    shapes, seen = set(), []
    while len(set(seen)) < len(samples):
        shape, indices = order.next()
        shapes.add(shape)
        assert len(indices) == shape.batch == 8
        assert max(len(samples[index].ids) for index in indices) <= shape.width
        assert shape.size <= shape.batch * shape.width
        seen += indices
    assert len(shapes) <= 5
    assert len(seen) < len(samples) + 8 * len(shapes)
    assert unpack(pack(samples)) == samples


def test_the_model_ends_prompts_and_none_names_what_is_held_out(model: Path) -> None:
    begun = openings(10, seed=1)
    assert openings(10, seed=1) == begun
    assert {prompt.task for prompt in begun} == set(TASKS)
    assert not any(names_held_out(prompt.text) for prompt in begun)
    assert all(names_held_out(prompt.text) for prompt in built_in("held_out", 40))
    checkpoint = open_checkpoint(model)
    decoder = load_frozen(checkpoint, 512, CPU, torch.float32)
    ended = go_on(checkpoint, decoder, begun[:12], max_tokens=300, batch=64, seed=0)
    assert any(prompt.text.startswith(opening.text) for opening in begun for prompt in ended)
    assert len(set(ended)) == len(ended)


@pytest.mark.slow
def test_acceptance_rises_and_a_resumed_run_goes_on_where_it_stopped(model: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(model)
    state = tmp_path / "head.state"

    def run(steps: int, resume: bool) -> float:
        result = train(checkpoint, PROMPTS, {"held_out": PROMPTS[:4], "other": HELD_OUT}, settings(steps=steps),
                       device=CPU, state_path=state, resume=resume)  # fmt: skip
        assert result.progress.step == steps
        assert sorted(result.draft_tokens) == list(range(300))
        found = result.acceptance["other"]
        return sum(each.tokens for each in found.values()) / sum(each.steps for each in found.values())

    start, middle = run(1, False), run(40, True)
    assert run(80, True) > middle > start
    with pytest.raises(OutputError, match="was started with batch 8, now it is 4"):
        train(checkpoint, PROMPTS, {"held_out": HELD_OUT}, settings(batch=4), device=CPU, state_path=state, resume=True)


def test_a_hybrid_is_refused(tmp_path: Path) -> None:
    toys.make_qwen3_5(tmp_path)
    with pytest.raises(CheckpointError, match="a hybrid"):
        load_frozen(open_checkpoint(tmp_path), 64, CPU, torch.float32)


@pytest.mark.slow
def test_the_command_writes_a_head_that_the_build_takes_its_card_and_a_report(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Tell me about number {n}.\n" for n in range(12)))
    head, report = tmp_path / "out" / "head.safetensors", tmp_path / "out" / "report.json"
    arguments = ["train-mtp", "--model", str(model), "--output", str(head), "--prompts", str(prompts),
                 "--minutes", "0.08", "--max-tokens", "24", "--batch", "4", "--device", "cpu",
                 "--report", str(report)]  # fmt: skip
    ran = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    assert "mean accepted length" in ran.output
    checkpoint = open_checkpoint(model)
    drafter = find_drafter(checkpoint, ModelConfig.from_hf(checkpoint.config), head)
    assert drafter is not None
    assert len(drafter.acceptance) == 3
    document = json.loads(report.read_text())
    assert document["steps"] > 0
    assert document["acceptance"]["held_out"]["own"]["steps"] > 0
    assert "| held_out | own |" in head.with_suffix(".md").read_text()
    other = tmp_path / "other.safetensors"
    again = [*arguments[:4], str(other), *arguments[5:], "--from", str(head), "--minutes", "0.06"]
    ran = CliRunner().invoke(cli, again, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    assert "It went on from a head" in other.with_suffix(".md").read_text()
