"""The training run: text from the model, then the module against it; logs, a state file, a head at the end.

The order of the work stands here. How long it may take is given in minutes (or in steps, for tests); the learning rate
follows the share that has passed.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edgebuild.checkpoint import Checkpoint
from edgebuild.errors import CheckpointError, OutputError
from edgebuild.models.decoder import Decoder
from edgebuild.models.mtp import Mtp
from edgebuild.train.forward import load_frozen, whole
from edgebuild.train.generate import Encoded, Sample, encode_prompts, generate
from edgebuild.train.prompts import Prompt
from edgebuild.train.unroll import Acceptance, Batch, chain_loss, correct_guesses, walk

Log = Callable[[str], None]
_TRAINING_SHARE = 0.95  # of the minutes; the rest is for the last measurement and for writing files


@dataclass(frozen=True)
class Settings:
    """What a run is told.

    minutes        for everything: a quarter of it at most goes into writing text
    steps          optimiser steps instead of minutes (tests)
    depth          chain length in training, and the draft length that acceptance is measured at
    temperatures   each prompt is answered once at each; the first is what held-out prompts are answered at
    hard           weight of the model's best token beside its distribution
    batch          sequences an optimiser step; gen_batch: sequences generated at once
    """

    minutes: float = 10.0
    steps: int | None = None
    depth: int = 3
    max_tokens: int = 224
    longest_prompt: int = 160
    temperatures: tuple[float, ...] = (0.0, 0.4, 0.8)
    learning_rate: float = 1e-3
    hard: float = 0.5
    batch: int = 64
    gen_batch: int = 1024
    generate_share: float = 0.25
    seed: int = 0


@dataclass
class Progress:
    """What a resumed run takes up again."""

    settings: Settings
    samples: list[Sample] = field(default_factory=list)
    held_out: dict[str, list[Sample]] = field(default_factory=dict)
    step: int = 0
    trained_s: float = 0.0
    generated_s: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)


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
    state_path: Path | None = None,
    resume: bool = False,
    log: Log = lambda _line: None,
    clock: Callable[[], float] = time.monotonic,
) -> Trained:
    """Train a module for `checkpoint`. held_out: set name → prompts; the first set is measured during training.

    Raises CheckpointError for a model that is not dense, OutputError when the state file is not this run's.
    """
    began = clock()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    positions = settings.longest_prompt + settings.max_tokens + settings.depth + 64
    decoder = load_frozen(checkpoint, positions, device, dtype)
    log(f"model on {device}, {dtype}, after {clock() - began:.1f} s")
    torch.manual_seed(settings.seed)
    mtp = start_module(decoder).to(device)
    optimiser = torch.optim.AdamW(mtp.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    progress = Progress(settings)
    if resume and state_path is not None:
        progress = _load(state_path, settings, mtp, optimiser, device)
        log(f"resumed at step {progress.step}, {progress.trained_s:.0f} s of training done")
    eos = checkpoint.tokenizer.eos_token_ids
    if not progress.samples:
        _write_text(checkpoint, decoder, prompts, held_out, progress, eos, log, clock)
        if state_path is not None:
            _save(state_path, progress, mtp, optimiser)
    store = _Store(decoder, progress.samples, settings.seed)
    held = {name: _Store(decoder, samples, 0) for name, samples in progress.held_out.items()}
    first = next(iter(held), None)
    spent_s = progress.generated_s if progress.step else clock() - began
    total_s = max(1.0, _TRAINING_SHARE * settings.minutes * 60 - spent_s)
    saved = clock()
    measured = 0.0
    while not _done(progress, settings, total_s):
        turn_began = clock()
        share = progress.step / settings.steps if settings.steps else progress.trained_s / total_s
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * _rate(share, progress.step)
        with _mixed(decoder):
            loss = chain_loss(mtp, decoder, store.next(settings.batch), settings.depth, settings.hard)
        optimiser.zero_grad(set_to_none=True)
        loss.total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(mtp.parameters(), 1.0)
        optimiser.step()
        progress.step += 1
        if progress.step % 100 == 0 or progress.step == 1:
            entry = {
                "step": progress.step,
                "loss": round(float(loss.total.detach()), 4),
                "agreement": list(loss.agreement),
            }
            progress.log.append(entry)
            log(f"step {progress.step} loss {entry['loss']} agreement {_rates(loss.agreement)}")
        if first is not None and share - measured >= 0.2:
            measured = share
            found = measure(mtp, decoder, held[first], settings.depth)
            progress.log.append({"step": progress.step, "held_out": table({first: found})})
            log(f"step {progress.step} {first}: " + ", ".join(f"{t} {a.mean_length:.2f}" for t, a in found.items()))
        progress.trained_s += clock() - turn_began
        if state_path is not None and clock() - saved > 60:
            _save(state_path, progress, mtp, optimiser)
            saved = clock()
    acceptance = {name: measure(mtp, decoder, each, settings.depth) for name, each in held.items()}
    if state_path is not None:
        _save(state_path, progress, mtp, optimiser)
    return Trained(mtp, acceptance, progress, _by_frequency(progress.samples, decoder.token_limit))


def start_module(decoder: Decoder) -> Mtp:
    """Where training starts: fc the mean of its two halves, layer and norm those at the model's end. Float32."""
    mtp = Mtp(decoder.config, torch.float32)
    hidden = decoder.config.hidden_size
    half = 0.5 * torch.eye(hidden)
    values = {"fc.weight": torch.cat([half, half], dim=1), "norm.weight": decoder.model.norm.weight}
    neutral = torch.zeros(hidden) if decoder.config.zero_centred_norms else torch.ones(hidden)
    values |= {f"pre_fc_norm_{name}.weight": neutral for name in ("embedding", "hidden")}
    values |= {f"layers.0.{name}": value for name, value in decoder.layers[-1].named_parameters()}
    with torch.no_grad():
        for name, parameter in mtp.named_parameters():
            parameter.copy_(values[name].float())
            parameter.requires_grad_(True)
    return mtp


def measure(mtp: Mtp, decoder: Decoder, store: _Store, depth: int, batch: int = 32) -> dict[str, Acceptance]:
    """Acceptance by task over every sequence of a store, greedy, in a chain as at run time."""
    nothing = Acceptance((0,) * depth, (0,) * depth, 0, 0)
    found: dict[str, Acceptance] = {}
    for first in range(0, len(store.samples), batch):
        part = list(range(first, min(first + batch, len(store.samples))))
        with _mixed(decoder):
            correct = correct_guesses(mtp, decoder, store.take(part), depth).cpu().tolist()
        for row, index in enumerate(part):
            sample = store.samples[index]
            steps = walk([turn[row] for turn in correct], sample.start, len(sample.ids))
            found[sample.task] = found.get(sample.task, nothing) + steps
    return dict(sorted(found.items()))


def table(acceptance: dict[str, dict[str, Acceptance]]) -> dict[str, Any]:
    """Acceptance as JSON: set → task → rates by position and mean length."""
    return {
        name: {
            task: {"acceptance": [round(rate, 4) for rate in each.rates],
                   "mean_accepted_length": round(each.mean_length, 4), "steps": each.steps}
            for task, each in tasks.items()
        }
        for name, tasks in acceptance.items()
    }  # fmt: skip


class _Store:
    """Sequences on the device with the model's hidden rows, computed once where they fit, else batch by batch."""

    def __init__(self, decoder: Decoder, samples: Sequence[Sample], seed: int) -> None:
        self.samples = samples
        self._decoder = decoder
        self._rng = random.Random(seed)
        self._queue: list[list[int]] = []
        self._device = decoder.model.embed_tokens.weight.device
        self._hidden: list[Tensor] | None = None
        needed = sum(len(s.ids) for s in samples) * decoder.config.hidden_size * 2
        if self._device.type == "cuda" and needed < 0.3 * torch.cuda.mem_get_info()[0]:
            self._hidden = self._precompute()

    def next(self, batch: int) -> Batch:
        """The next batch of sequences of like length; every sequence comes once before any comes again."""
        if not self._queue:
            order = sorted(range(len(self.samples)), key=lambda i: len(self.samples[i].ids) + self._rng.random() * 16)
            self._queue = [order[first : first + batch] for first in range(0, len(order), batch)]
            self._rng.shuffle(self._queue)
        return self.take(self._queue.pop())

    def take(self, indices: Sequence[int]) -> Batch:
        chosen = [self.samples[index] for index in indices]
        longest = max(len(sample.ids) for sample in chosen)
        tokens = torch.zeros(len(chosen), longest, dtype=torch.int64)
        for row, sample in enumerate(chosen):
            tokens[row, : len(sample.ids)] = torch.tensor(sample.ids)
        tokens = tokens.to(self._device)
        if self._hidden is None:
            with torch.no_grad():
                hidden = whole(self._decoder, tokens)
        else:
            rows = [self._hidden[index] for index in indices]
            hidden = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        start = torch.tensor([sample.start for sample in chosen], device=self._device)
        length = torch.tensor([len(sample.ids) for sample in chosen], device=self._device)
        return Batch(tokens, hidden, start, length)

    def _precompute(self) -> list[Tensor]:
        order = sorted(range(len(self.samples)), key=lambda index: len(self.samples[index].ids))
        hidden: dict[int, Tensor] = {}
        for first in range(0, len(order), 256):
            part = order[first : first + 256]
            rows = self.take(part).hidden
            hidden |= {index: rows[row, : len(self.samples[index].ids)].clone() for row, index in enumerate(part)}
        return [hidden[index] for index in range(len(self.samples))]


def _write_text(
    checkpoint: Checkpoint,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    held_out: Mapping[str, Sequence[Prompt]],
    progress: Progress,
    eos: Sequence[int],
    log: Log,
    clock: Callable[[], float],
) -> None:
    settings = progress.settings
    began = clock()

    def answer(encoded: Sequence[Encoded], temperature: float, number: int, limit_s: float) -> list[Sample]:
        samples = generate(
            decoder,
            encoded,
            temperature=temperature,
            max_tokens=settings.max_tokens,
            eos=eos,
            batch=settings.gen_batch,
            seed=settings.seed + 100_003 * number,
            stop=lambda: settings.steps is None and clock() - began > limit_s,
        )
        return [sample for sample in samples if len(sample.ids) >= sample.start + settings.depth + 2]

    budget_s = settings.generate_share * settings.minutes * 60
    for number, (name, asked) in enumerate(held_out.items()):
        encoded = encode_prompts(checkpoint, asked, settings.longest_prompt)
        progress.held_out[name] = answer(encoded, settings.temperatures[0], number, math.inf)
        log(f"{name}: {len(progress.held_out[name])} answers, {clock() - began:.1f} s")
    encoded = encode_prompts(checkpoint, prompts, settings.longest_prompt)
    asked_before = {tuple(s.ids[: s.start]) for samples in progress.held_out.values() for s in samples}
    encoded = [prompt for prompt in encoded if prompt.ids not in asked_before]
    for number, temperature in enumerate(settings.temperatures, 1):
        progress.samples += answer(encoded, temperature, number + 10, budget_s)
        answers = sum(len(s.ids) - s.start for s in progress.samples)
        log(f"temperature {temperature}: {len(progress.samples)} answers, {answers:,} tokens, {clock() - began:.1f} s")
    if not progress.samples:
        raise CheckpointError("the model wrote no answer longer than a few tokens", hint="give other --prompts")
    progress.generated_s = clock() - began


def _mixed(decoder: Decoder) -> torch.autocast:
    """bfloat16 arithmetic around a float32 module, where the model itself is in bfloat16."""
    device = decoder.model.embed_tokens.weight.device
    return torch.autocast(device.type, torch.bfloat16, enabled=decoder.dtype == torch.bfloat16)


def _done(progress: Progress, settings: Settings, total_s: float) -> bool:
    if settings.steps is not None:
        return progress.step >= settings.steps
    return progress.trained_s >= total_s


def _rate(share: float, step: int) -> float:
    """Warm-up over 50 steps, then a cosine down to 2 %."""
    return min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


def _rates(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def _by_frequency(samples: Sequence[Sample], token_limit: int) -> tuple[int, ...]:
    """Every id of the vocabulary: those of the answers first, the most frequent leading, then the rest in order."""
    counts = Counter(token for sample in samples for token in sample.ids[sample.start :])
    return tuple(sorted(range(token_limit), key=lambda token: (-counts[token], token)))


def _save(path: Path, progress: Progress, mtp: Mtp, optimiser: torch.optim.Optimizer) -> None:
    document = {
        "settings": json.dumps(asdict(progress.settings), sort_keys=True),
        "samples": [(s.task, list(s.ids), s.start) for s in progress.samples],
        "held_out": {n: [(s.task, list(s.ids), s.start) for s in each] for n, each in progress.held_out.items()},
        "numbers": (progress.step, progress.trained_s, progress.generated_s),
        "log": json.dumps(progress.log),
        "mtp": mtp.state_dict(),
        "optimiser": optimiser.state_dict(),
    }
    partial = path.with_name(path.name + ".part")
    torch.save(document, partial)
    os.replace(partial, path)


def _load(path: Path, settings: Settings, mtp: Mtp, optimiser: torch.optim.Optimizer, device: torch.device) -> Progress:
    if not path.exists():
        raise OutputError(f"{path}: no state to resume from", hint="leave --resume out to start anew")
    document = torch.load(path, map_location=device, weights_only=True)
    before = json.loads(document["settings"])
    now = json.loads(json.dumps(asdict(settings)))
    changed = [key for key in now if key not in ("minutes", "steps") and now[key] != before[key]]
    if changed:
        raise OutputError(
            f"{path}: was started with {changed[0]} {before[changed[0]]}, now it is {now[changed[0]]}",
            hint="use the same settings, or leave --resume out",
        )
    mtp.load_state_dict(document["mtp"])
    optimiser.load_state_dict(document["optimiser"])
    step, trained_s, generated_s = document["numbers"]

    def samples(entries: Sequence[Any]) -> list[Sample]:
        return [Sample(task, tuple(ids), start) for task, ids, start in entries]

    return Progress(
        settings,
        samples(document["samples"]),
        {name: samples(entries) for name, entries in document["held_out"].items()},
        step,
        trained_s,
        generated_s,
        json.loads(document["log"]),
    )
