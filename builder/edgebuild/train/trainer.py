"""The training run: text from the model, then the module against it; logs, a state file, a head at the end.

The order of the work stands here. How long it may take is given in minutes (or in steps, for tests); the learning rate
follows the share that has passed.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgebuild.checkpoint import Checkpoint
from edgebuild.errors import CheckpointError
from edgebuild.models.decoder import Decoder
from edgebuild.models.mtp import Mtp
from edgebuild.train.acceptance import Acceptance, count_steps
from edgebuild.train.forward import load_frozen
from edgebuild.train.generate import Encoded, Sample, encode_prompts, generate, go_on
from edgebuild.train.learner import Learner
from edgebuild.train.progress import Progress, Settings, load, save
from edgebuild.train.prompts import Prompt, names_held_out
from edgebuild.train.store import Order, Store
from edgebuild.train.unroll import correct_guesses

Log = Callable[[str], None]
_TRAINING_SHARE = 0.95  # of the minutes; the rest is for the last measurement and for writing files
_LOOK_EVERY = 100  # steps; then the device is waited for, too, and the clock is right
_LONGEST_ENDING = 48  # tokens that the model may add to the beginning of a prompt


@dataclass(frozen=True)
class Trained:
    """The module (float32), what it was trained on, and what it accepts by set and task."""

    mtp: Mtp
    acceptance: dict[str, dict[str, Acceptance]]
    progress: Progress
    draft_tokens: tuple[int, ...]


def train(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    held_out: Mapping[str, Sequence[Prompt]],
    settings: Settings,
    *,
    device: torch.device,
    openings: Sequence[Prompt] = (),
    start: Mapping[str, Tensor] | None = None,
    state_path: Path | None = None,
    resume: bool = False,
    log: Log = lambda _line: None,
    clock: Callable[[], float] = time.monotonic,
) -> Trained:
    """Train a module for `checkpoint`. held_out: set name → prompts; the first set is measured during training.

    openings: beginnings of prompts that the model is to end itself. start: weights of a module to go on from. Raises
    CheckpointError for a model that is not dense, OutputError when the state file is not this run's.
    """
    began = clock()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    recipe = settings.recipe
    positions = settings.longest_prompt + settings.max_tokens + recipe.depth + 64
    decoder = load_frozen(checkpoint, positions, device, dtype)
    log(f"model on {device}, {dtype}, after {clock() - began:.1f} s")
    progress, before = Progress(settings), None
    if resume and state_path is not None:
        progress, before = load(state_path, settings, device)
        log(f"resumed at step {progress.step}, {progress.trained_s:.0f} s of training done")
    if not progress.samples:
        write_text(checkpoint, decoder, prompts, openings, held_out, progress, log, clock)
    used = by_frequency(progress.samples, decoder.token_limit)
    learner = Learner(decoder, recipe, guessed_rows(decoder, used[: settings.vocabulary]), settings.seed)
    if start is not None:
        learner.mtp.load_state_dict(start)
    if before is not None:
        learner.take_up(before)
    elif state_path is not None:
        save(state_path, progress, learner)
    store, order = Store(decoder, progress.samples), Order(progress.samples, settings.batch, settings.seed)
    held = {name: Store(decoder, samples) for name, samples in progress.held_out.items()}
    first = next(iter(held), None)
    spent_s = progress.generated_s if progress.step else clock() - began
    total_s = max(1.0, _TRAINING_SHARE * settings.minutes * 60 - spent_s)
    log(f"{clock() - began:.1f} s: training begins, for {total_s - progress.trained_s:.0f} s")
    saved = clock()
    measured = 0.0
    while not _done(progress, settings, total_s):
        turn_began = clock()
        share = progress.step / settings.steps if settings.steps else progress.trained_s / total_s
        shape, chosen = order.next()
        learner.learn(store.take(chosen, shape.width), shape.size, share, progress.step)
        progress.step += 1
        if progress.step % _LOOK_EVERY == 0 or progress.step == 1:
            loss, rates = learner.last
            progress.log.append({"step": progress.step, "loss": round(loss, 4), "agreement": rates})
            log(f"step {progress.step} loss {loss:.4f} agreement {_rates(rates)}")
        if first is not None and share - measured >= 0.2:
            measured = share
            found = measure(learner, decoder, held[first])
            progress.log.append({"step": progress.step, "held_out": table_of({first: found})})
            log(f"step {progress.step} {first}: " + ", ".join(f"{t} {a.mean_length:.2f}" for t, a in found.items()))
        progress.trained_s += clock() - turn_began
        if state_path is not None and clock() - saved > 60:
            save(state_path, progress, learner)
            saved = clock()
    acceptance = {name: measure(learner, decoder, each) for name, each in held.items()}
    if state_path is not None:
        save(state_path, progress, learner)
    return Trained(learner.mtp, acceptance, progress, used)


def measure(learner: Learner, decoder: Decoder, store: Store, batch: int = 32) -> dict[str, Acceptance]:
    """Acceptance by task over every sequence of a store, greedy, in a chain as at run time."""
    return measure_among(learner, decoder, store, (None,), batch)[0]


def measure_among(
    learner: Learner, decoder: Decoder, store: Store, allowed: Sequence[Tensor | None], batch: int = 32
) -> list[dict[str, Acceptance]]:
    """The same for several sets of tokens that may be drafted; None: every token."""
    depth = learner.recipe.depth
    nothing = Acceptance((0,) * depth, (0,) * depth, 0, 0)
    results: list[dict[str, Acceptance]] = [{} for _ in allowed]
    order = sorted(range(len(store.samples)), key=lambda index: len(store.samples[index].ids))
    for first in range(0, len(order), batch):
        part = order[first : first + batch]
        with learner.mixed():
            taken = store.take(part)
            found = correct_guesses(learner.mtp, decoder, taken, depth, allowed)
        for result, correct in zip(results, found, strict=True):
            for index, steps in zip(part, count_steps(correct, taken.start, taken.length), strict=True):
                task = store.samples[index].task
                result[task] = result.get(task, nothing) + steps
    return [dict(sorted(result.items())) for result in results]


def table_of(acceptance: Mapping[str, Mapping[str, Acceptance]]) -> dict[str, Any]:
    """Acceptance as JSON: set → task → rates by position and mean length."""
    return {
        name: {
            task: {"acceptance": [round(rate, 4) for rate in each.rates],
                   "mean_accepted_length": round(each.mean_length, 4), "steps": each.steps}
            for task, each in tasks.items()
        }
        for name, tasks in acceptance.items()
    }  # fmt: skip


def write_text(
    checkpoint: Checkpoint,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    openings: Sequence[Prompt],
    held_out: Mapping[str, Sequence[Prompt]],
    progress: Progress,
    log: Log,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Fill progress.held_out and progress.samples with answers. No held-out prompt is trained on, and no prompt that
    the model wrote names what only held-out prompts may name."""
    settings = progress.settings
    began = clock()
    budget_s = settings.generate_share * settings.minutes * 60

    def answer(encoded: Sequence[Encoded], temperature: float, number: int, limit_s: float) -> list[Sample]:
        samples = generate(
            decoder,
            encoded,
            temperature=temperature,
            max_tokens=settings.max_tokens,
            eos=checkpoint.tokenizer.eos_token_ids,
            batch=settings.gen_batch,
            seed=settings.seed + 100_003 * number,
            stop=lambda: settings.steps is None and clock() - began > limit_s,
        )
        return [sample for sample in samples if len(sample.ids) >= sample.start + settings.recipe.depth + 2]

    for number, (name, asked) in enumerate(held_out.items()):
        encoded = encode_prompts(checkpoint, asked, settings.longest_prompt)
        progress.held_out[name] = answer(encoded, settings.temperatures[0], number, math.inf)
        log(f"{name}: {len(progress.held_out[name])} answers, {clock() - began:.1f} s")
    held = {prompt.text for asked in held_out.values() for prompt in asked}
    everything = [prompt for prompt in prompts if prompt.text not in held]
    if openings:
        ended = go_on(
            checkpoint, decoder, openings, max_tokens=_LONGEST_ENDING, batch=settings.gen_batch, seed=settings.seed
        )
        known = {prompt.text for prompt in everything}
        new = [p for p in ended if p.text not in held and p.text not in known and not names_held_out(p.text)]
        everything += new
        random.Random(settings.seed).shuffle(everything)
        log(f"{len(new)} prompts of the model's own, {clock() - began:.1f} s")
    encoded = encode_prompts(checkpoint, everything, settings.longest_prompt)
    for number, temperature in enumerate(settings.temperatures, 1):
        progress.samples += answer(encoded, temperature, number + 10, budget_s)
        answers = sum(len(s.ids) - s.start for s in progress.samples)
        log(f"temperature {temperature}: {len(progress.samples)} answers, {answers:,} tokens, {clock() - began:.1f} s")
    if not progress.samples:
        raise CheckpointError("the model wrote no answer longer than a few tokens", hint="give other --prompts")
    progress.generated_s = clock() - began


def guessed_rows(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Rows [V', H] of the head for those tokens, in ascending order."""
    head = decoder.model.embed_tokens if decoder.lm_head is None else decoder.lm_head
    return head.weight[torch.tensor(sorted(tokens), device=head.weight.device)]


def by_frequency(samples: Sequence[Sample], token_limit: int) -> tuple[int, ...]:
    """Every id of the vocabulary: those of the answers first, the most frequent leading, then the rest in order."""
    counts = Counter(token for sample in samples for token in sample.ids[sample.start :])
    return tuple(sorted(range(token_limit), key=lambda token: (-counts[token], token)))


def _done(progress: Progress, settings: Settings, total_s: float) -> bool:
    if settings.steps is not None:
        return progress.step >= settings.steps
    return progress.trained_s >= total_s


def _rates(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)
