"""Variants of training an MTP head, on the same text, in turns on one GPU; then a long run of one of them.

`python benchmarks/train_variants.py text MODEL TEXT` writes the text, `... compare MODEL TEXT --seconds S` trains every
variant below for an equal share of the time, `... final MODEL TEXT HEAD --seconds S [--set field=value]` trains one
recipe and measures how acceptance changes with the tokens that may be drafted. Each prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from edgebuild.checkpoint import Checkpoint, open_checkpoint
from edgebuild.models.decoder import Decoder
from edgebuild.train.acceptance import Acceptance
from edgebuild.train.forward import load_frozen
from edgebuild.train.generate import Sample, pack, unpack
from edgebuild.train.learner import Learner, Recipe
from edgebuild.train.progress import Progress, Settings
from edgebuild.train.prompts import built_in, openings
from edgebuild.train.store import Order, Store
from edgebuild.train.trainer import by_frequency, guessed_rows, measure, measure_among, table_of, write_text
from environment import environment
from safetensors.torch import load_file, save_file

TASKS = ("json", "code", "chat", "story")
BASE = Recipe(optimiser="adamw", learning_rate=1e-3, off_path=1.0, off_path_end=1.0)  # of the head before
VARIANTS: dict[str, tuple[Recipe, str]] = {
    "as shipped before": (BASE, "all"),
    "best token alone": (replace(BASE, hard=1e9), "all"),
    "guesses on the path": (replace(BASE, off_path=0.2, off_path_end=0.2), "all"),
    "fresh layer": (replace(BASE, start="fresh"), "all"),
    "rate 3e-3": (replace(BASE, learning_rate=3e-3), "all"),
    "muon, rate 3e-3": (replace(BASE, optimiser="muon", learning_rate=3e-3), "all"),
    "muon, rate 3e-3, fresh layer": (replace(BASE, optimiser="muon", learning_rate=3e-3, start="fresh"), "all"),
    "greedy text alone": (BASE, "greedy"),
}
VOCABULARIES = (32768, 16384, 8192, 4096)


def write(checkpoint: Checkpoint, decoder: Decoder, options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    settings = Settings(minutes=options.text_seconds / 60, generate_share=1.0, max_tokens=options.max_tokens)
    progress = Progress(settings)
    held = {"held_out": built_in("held_out", options.held), "new_kinds": built_in("new", options.held)}
    write_text(checkpoint, decoder, built_in("train", options.built_in), openings(options.openings), held, progress,
               lambda line: print(line, flush=True))  # fmt: skip

    document = {"samples": pack(progress.samples), "held_out": {n: pack(s) for n, s in progress.held_out.items()}}
    torch.save(document, options.text)
    return {"answers": len(progress.samples), "seconds": round(time.monotonic() - began, 1)}


Text = tuple[list[Sample], dict[str, list[int]], dict[str, list[Sample]]]


def add(checkpoint: Checkpoint, decoder: Decoder, options: argparse.Namespace) -> dict[str, Any]:
    """More greedy answers, to other prompts of the model's own, before those that the file has."""
    began = time.monotonic()
    document = torch.load(options.text, weights_only=True)
    known = {sample.ids[: sample.start] for each in document["held_out"].values() for sample in unpack(each)}
    settings = Settings(minutes=options.text_seconds / 60, generate_share=1.0, max_tokens=options.max_tokens,
                        temperatures=(0.0,), seed=options.seed, gen_batch=8192)  # fmt: skip
    progress = Progress(settings)
    write_text(checkpoint, decoder, [], openings(options.openings, seed=options.seed), {}, progress,
               lambda line: print(line, flush=True))  # fmt: skip
    new = [sample for sample in progress.samples if sample.ids[: sample.start] not in known]
    document["samples"] = pack([*new, *unpack(document["samples"])])
    torch.save(document, options.text)
    return {"answers": len(new), "seconds": round(time.monotonic() - began, 1)}


def read(options: argparse.Namespace) -> Text:
    """Samples; which of them are of each kind; held-out samples by set. Greedy answers come first in the file."""
    document = torch.load(options.text, weights_only=True)

    everything = unpack(document["samples"])
    seen: set[tuple[int, ...]] = set()
    boundary = len(everything)
    for place, sample in enumerate(everything):
        prompt = sample.ids[: sample.start]
        if prompt in seen:
            boundary = place
            break
        seen.add(prompt)
    kinds = {
        "all": list(range(len(everything))),
        "greedy": list(range(boundary)),
    }
    print({n: (len(k), sum(len(everything[i].ids) - everything[i].start for i in k)) for n, k in kinds.items()})
    return everything, kinds, {name: unpack(each) for name, each in document["held_out"].items()}


def mean(tasks: Mapping[str, Acceptance]) -> float:
    chosen = [tasks[task].mean_length for task in TASKS if task in tasks]
    return sum(chosen) / max(1, len(chosen))


def compare(_checkpoint: Checkpoint, decoder: Decoder, options: argparse.Namespace) -> dict[str, Any]:
    samples, kinds, held = read(options)
    store, tests = Store(decoder, samples), {name: Store(decoder, each) for name, each in held.items()}
    places = {kind: {new: old for new, old in enumerate(chosen)} for kind, chosen in kinds.items()}
    orders = {kind: Order([samples[i] for i in chosen], options.batch, 0) for kind, chosen in kinds.items()}
    table = guessed_rows(decoder, by_frequency(samples, decoder.token_limit)[:16384])
    chosen = [name for name in VARIANTS if not options.only or name in options.only.split(";")]
    learners = {name: Learner(decoder, VARIANTS[name][0], table, 0) for name in chosen}
    _sync()
    began, steps, spent = time.monotonic(), 0, 0.0
    while spent < options.seconds:
        turn = {kind: orders[kind].next() for kind in {VARIANTS[name][1] for name in chosen}}
        for name, learner in learners.items():
            kind = VARIANTS[name][1]
            shape, indices = turn[kind]
            batch = store.take([places[kind][index] for index in indices], shape.width)
            learner.learn(batch, shape.size, spent / options.seconds, steps)
        steps += 1
        _sync()
        spent = time.monotonic() - began
    if options.before is not None:
        learners = {"the head before": before(decoder, options.before, BASE, table), **learners}
    rows = []
    for name, learner in learners.items():
        found = {each: measure(learner, decoder, test) for each, test in tests.items()}
        row: dict[str, Any] = {"variant": name}
        for each, tasks in found.items():
            row |= {f"{each} {task}": round(tasks[task].mean_length, 3) for task in TASKS if task in tasks}
            row[f"{each} mean"] = round(mean(tasks), 3)
        rows.append(row)
        print(row, flush=True)
    return {"steps": steps, "batch": options.batch, "seconds": round(spent, 1), "rows": rows}


def before(decoder: Decoder, path: Path, recipe: Recipe, table: torch.Tensor) -> Learner:
    """A head from a file, to be measured on the same answers or to be gone on from."""
    learner = Learner(decoder, recipe, table, 0)
    tensors = load_file(str(path))
    learner.mtp.load_state_dict({name.removeprefix("mtp."): t for name, t in tensors.items() if name != "draft_tokens"})
    return learner


def final(_checkpoint: Checkpoint, decoder: Decoder, options: argparse.Namespace) -> dict[str, Any]:
    samples, kinds, held = read(options)
    changes = dict(each.split("=", 1) for each in options.set)
    kind = changes.pop("text", "all")
    fields: dict[str, Any] = {k: v if k in ("start", "optimiser") else float(v) for k, v in changes.items()}
    recipe = replace(Recipe(), **fields)
    used = [samples[index] for index in kinds[kind]]
    store, tests = Store(decoder, used), {name: Store(decoder, each) for name, each in held.items()}
    order, frequent = Order(used, options.batch, 1), by_frequency(samples, decoder.token_limit)
    table = guessed_rows(decoder, frequent[:16384])
    learner = Learner(decoder, recipe, table, 0)
    if options.before is not None:
        learner = before(decoder, options.before, recipe, table)
    _sync()
    began, steps, spent, measured = time.monotonic(), 0, 0.0, 0.0
    log: list[dict[str, Any]] = []
    while spent < options.seconds:
        share = spent / options.seconds
        shape, indices = order.next()
        learner.learn(store.take(indices, shape.width), shape.size, share, steps)
        steps += 1
        if steps % 250 == 0:
            loss, agreement = learner.last
            log.append({"step": steps, "loss": round(loss, 4), "agreement": [round(each, 4) for each in agreement]})
            print(f"{spent:.1f} s", log[-1], flush=True)
        if steps % 20 == 0:
            _sync()
        if share - measured >= 0.45:
            measured = share
            found = measure(learner, decoder, tests["held_out"])
            log.append({"step": steps, "held_out": table_of({"held_out": found}), "mean": round(mean(found), 4)})
            print(f"{spent:.0f} s step {steps}: {mean(found):.3f}", flush=True)
        spent = time.monotonic() - began
    _sync()
    tensors = {f"mtp.{n}": p.detach().cpu().to(torch.float16) for n, p in learner.mtp.named_parameters()}
    tensors["draft_tokens"] = torch.tensor(frequent, dtype=torch.int32)
    save_file(tensors, str(options.head))
    device = decoder.model.embed_tokens.weight.device
    sizes = [None, *(size for size in VOCABULARIES if size < decoder.token_limit)]
    allowed = [None if size is None else torch.tensor(sorted(frequent[:size]), device=device) for size in sizes]
    acceptance: dict[str, Any] = {}
    rows = []
    for name, test in tests.items():
        results = measure_among(learner, decoder, test, allowed)
        acceptance |= table_of({name: results[0]})
        for size, tasks in zip(sizes, results, strict=True):
            row: dict[str, Any] = {"prompts": name, "draft_vocabulary": size or decoder.token_limit}
            row |= {task: round(each.mean_length, 4) for task, each in tasks.items()}
            row["mean of json, code, chat, story"] = round(mean(tasks), 4)
            rows.append(row)
            print(row, flush=True)
    return {
        "recipe": asdict(recipe), "text": kind, "batch": options.batch, "steps": steps, "seconds": round(spent, 1),
        "answers": len(used), "answer_tokens": sum(len(s.ids) - s.start for s in used),
        "prompts": len({s.ids[: s.start] for s in used}), "acceptance": acceptance, "rows": rows, "log": log,
    }  # fmt: skip


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", help="text, compare, final; or several of them, joined by +")
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("head", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    parser.add_argument("--text-seconds", type=float, default=60.0)
    parser.add_argument("--built-in", type=int, default=3000, help="prompts a task")
    parser.add_argument("--openings", type=int, default=5000, help="a task")
    parser.add_argument("--held", type=int, default=60, help="held-out prompts a task")
    parser.add_argument("--seed", type=int, default=1, help="of the text that is added")
    parser.add_argument("--max-tokens", type=int, default=224)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--only", default="", help="variants, separated by ;")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--before", type=Path, help="a head to measure beside the variants")
    parser.add_argument("--out", type=Path, help="folder")
    options = parser.parse_args()
    began = time.monotonic()
    checkpoint = open_checkpoint(options.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    decoder = load_frozen(checkpoint, 512, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    print(f"model loaded after {time.monotonic() - began:.1f} s", flush=True)
    work = {"text": write, "add": add, "compare": compare, "final": final}
    name = torch.cuda.get_device_name() if device.type == "cuda" else None
    for what in options.what.split("+"):
        started = time.monotonic()
        result = {**environment("torch", device=name), **work[what](checkpoint, decoder, options)}
        result["wall_s"] = round(time.monotonic() - started, 1)
        if options.out is not None:
            options.out.joinpath(f"{what}.json").write_text(json.dumps(result, indent=2) + "\n")
        print(f"{what} took {result['wall_s']} s", flush=True)


if __name__ == "__main__":
    main()
