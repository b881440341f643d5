"""Artifacts of a model's shape with random weights: every file that a real one has, through the real build.

python benchmarks/shape_artifacts.py checkpoint --shape 0.6b --output DIR     (numpy; the same bytes everywhere)
python benchmarks/shape_artifacts.py build --shape 0.6b --checkpoint DIR --output ARTIFACT [--drafter] [--no-engine]

Random weights are enough for time, memory and the agreement of one way to run with another; they say nothing of text.
The cells are named here and not planned, so that chunked and one-shot prefill stand in one engine.

checkpoint --drafter: every layer adds so little that the model repeats its last token, and an MTP module beside it does
the same. Greedy requests then accept every draft; with a temperature each draft is accepted with the probability of the
token itself, so any acceptance can be had (`temperature_for`), with every product as large as ever.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import SHAPES, Shape
from edgert.cells import Cell

NOISE = 1 << 22  # different values; they repeat, from another place in each tensor
CHUNK, ONE_SHOT = 512, 4096
PREFILL_TIERS = {"smollm2": (512, 1024, 2048, 4096, 8192), "0.6b": (512, 1024, 2048, 4096, 16896), "4b": (512, 4096)}
DECODE = {"0.6b": ((1, 1024), (1, 4096), (1, 16896), (4, 4096)), "4b": ((1, 1024), (1, 4096))}
ACCEPTED = 0.73  # of each draft: mean length 2.65 at three drafts, as SmolLM2 with its head
DRAFTED, LONGEST = 32_768, 4  # with a drafter: tokens that may be drafted, drafts a step
QUIET = 1 / 1024  # what a layer's two output projections are scaled by for a model that repeats
RARE = 1 / 4  # and the embedding of tokens that may not be drafted, which are then hardly ever sampled
HEAD = "mtp.safetensors"
GOLDEN_PROMPT = 23  # tokens: one short prompt, since the reference reads every weight in float32
DRAFTING = {"0.6b": ((1, 4096), (1, 16896), (4, 4096)), "4b": ((1, 1024),)}  # cells that verify, with a drafter
GOLDEN_TOLERANCE = 5e-2  # random weights in float16: the check is that nothing is out of place, not how well it rounds


def write_checkpoint(shape: Shape, directory: Path, *, seed: int = 0, drafter: bool = False) -> None:
    """A Hugging Face directory: config, tokenizer of single bytes and fillers, float16 safetensors."""
    from edgebuild.models.config import ModelConfig
    from edgebuild.models.mtp_config import expected_mtp_tensors

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config() | {"eos_token_id": shape.vocabulary - 1}))
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer(shape.vocabulary)))
    config = ModelConfig.from_hf(shape.config())
    _write_tensors(directory / "model.safetensors", config.expected_tensors(), seed, repeats=drafter)
    if drafter:
        length = 1.0 + sum(ACCEPTED**place for place in range(1, LONGEST + 1))
        rates = {"constructed": {"acceptance": [ACCEPTED] * LONGEST, "mean_accepted_length": length, "steps": 0}}
        card = json.dumps({"acceptance": {"held_out": rates}})
        drafted = np.arange(DRAFTED, dtype=np.int64)
        _write_tensors(
            directory / HEAD, expected_mtp_tensors(config), seed + 1, repeats=True, listed=drafted, card=card
        )


def _write_tensors(
    path: Path,
    expected: Mapping[str, tuple[int, ...]],
    seed: int,
    *,
    repeats: bool,
    listed: np.ndarray[Any, np.dtype[np.int64]] | None = None,
    card: str | None = None,
) -> None:
    """A safetensors file. repeats: of a model that repeats its last token. listed: `draft_tokens` of a sidecar."""
    rng = np.random.default_rng(seed)
    noise = np.tile((rng.standard_normal(NOISE) * 0.02).astype(np.float16), 2)
    header: dict[str, Any] = {} if card is None else {"__metadata__": {"card": card}}
    end = 0
    for name, dims in expected.items():
        size = 2 * int(np.prod(dims))
        header[name] = {"dtype": "F16", "shape": list(dims), "data_offsets": [end, end + size]}
        end += size
    if listed is not None:
        offsets = [end, end + listed.nbytes]
        header["draft_tokens"] = {"dtype": "I64", "shape": list(listed.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dims in expected.items():
            count = int(np.prod(dims))
            if "norm" in name:
                file.write(np.ones(count, np.float16).tobytes())
                continue
            if repeats and (special := _of_one_that_repeats(name, dims, rng)) is not None:
                file.write(special)
                continue
            start = int(rng.integers(0, NOISE))
            scale = np.float16(QUIET if repeats and name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
            while count:
                part = noise[start : start + min(count, NOISE)] * scale
                file.write(part.data)
                count -= len(part)
        if listed is not None:
            file.write(listed.tobytes())


def _of_one_that_repeats(name: str, dims: tuple[int, ...], rng: np.random.Generator) -> bytes | None:
    """An embedding whose rows all differ; a drafter's first product that takes the token's embedding alone."""
    if name.endswith("embed_tokens.weight"):
        table = (rng.standard_normal(dims, np.float32) * np.float32(0.02)).astype(np.float16)
        table[DRAFTED:] *= np.float16(RARE)
        return table.tobytes()
    if name == "mtp.fc.weight":
        # a little noise, so that no product is of zeros
        taken = rng.standard_normal(dims, np.float32) * np.float32(1e-4)
        taken[:, : dims[0]] += np.eye(dims[0], dtype=np.float32)
        return taken.astype(np.float16).tobytes()
    return None


def temperature_for(checkpoint: Path, shape: Shape, acceptance: float, *, top_k: int = 64) -> float:
    """At which a model that repeats (`checkpoint --drafter`) takes its own last token with that probability."""
    found = []
    with (checkpoint / "model.safetensors").open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        place = json.loads(file.read(size))["model.embed_tokens.weight"]["data_offsets"][0]
        table = np.memmap(file, np.float16, "r", 8 + size + place, (DRAFTED, shape.hidden))
        for token in range(0, DRAFTED, DRAFTED // 16):
            row = table[token].astype(np.float32)
            logits = np.sort(table.astype(np.float32) @ (row / np.sqrt(np.mean(row**2))))[-top_k:].astype(np.float64)
            low, high = 0.1, 100.0
            for _ in range(40):
                middle = (low * high) ** 0.5
                share = 1 / np.exp((logits - logits[-1]) / middle).sum()
                low, high = (middle, high) if share > acceptance else (low, middle)
            found.append(low)
    return float(np.median(found))


def _tokenizer(vocabulary: int) -> dict[str, Any]:
    """Byte-level BPE without merges: every text has ids, most ids have no text that gives them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = alphabet + [f"<{number}>" for number in range(len(alphabet), vocabulary)]
    tokenizer = Tokenizer(models.BPE({name: place for place, name in enumerate(names[:vocabulary])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    return document


def cells_of(shape: str, *, drafter: bool = False) -> tuple[Cell, ...]:
    """Chunks of 512 at several tiers, one chunk of 4,096, and decode for one and for four sequences."""
    drafting = [Cell("decode", batch, 1 + LONGEST, tier) for batch, tier in DRAFTING[shape] if drafter]
    return (
        *(Cell("prefill", 1, CHUNK, tier) for tier in PREFILL_TIERS[shape]),
        Cell("prefill", 1, ONE_SHOT, ONE_SHOT),
        *(Cell("decode", batch, 1 if drafter else 2, tier) for batch, tier in DECODE[shape]),
        *drafting,
    )


def build(shape: Shape, checkpoint: Path, output: Path, *, engine: bool, drafter: bool = False) -> None:
    """The real build, with the cells above in place of the planned ones."""
    from edgebuild import build as building
    from edgebuild import golden
    from edgebuild.plan.cells import PlannedCell
    from edgebuild.plan.memory import cache_tokens
    from edgebuild.profile import load_profile
    from edgebuild.progress import Stages
    from edgebuild.traffic import read_traffic

    cells = cells_of(shape.name, drafter=drafter)
    context = max(cell.kv_tier for cell in cells if cell.kind == "decode")
    base = load_profile("h200")
    assert base.traffic is not None
    limits = base.limits.model_copy(update={"context_tokens": context, "max_chunk": CHUNK, "min_chunk": CHUNK})
    profile = base.model_copy(update={"name": "h200", "limits": limits})
    if drafter:
        profile = profile.with_drafter(checkpoint / HEAD, vocabulary=DRAFTED, length=LONGEST)
    plan_as_ever = building.make_plan

    def fitted(*arguments: Any, **options: Any) -> Any:
        plan = plan_as_ever(*arguments, **options)
        known = {item.cell: item for item in plan.planned_cells}
        tiers = replace(plan.decode.tiers, tiers=tuple(sorted({c.kv_tier for c in cells if c.kind == "decode"})))
        batches = tuple(sorted({c.batch for c in cells if c.kind == "decode"}))
        decode = replace(plan.decode, tiers=tiers, batch_sizes=batches)
        return replace(
            plan,
            planned_cells=tuple(known.get(cell, PlannedCell(cell, 0, 0.0)) for cell in cells),
            cache_tokens=cache_tokens(context, ONE_SHOT),
            decode=decode,
        )

    building.make_plan = fitted
    golden.prompt_lengths = lambda _sizes, _context: [GOLDEN_PROMPT]
    golden.TOLERANCE = {**golden.TOLERANCE, "float16": GOLDEN_TOLERANCE}
    building.build(profile, checkpoint, read_traffic(base.traffic), output, Stages(), engine=engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["checkpoint", "build"])
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-engine", action="store_true")
    parser.add_argument("--drafter", action="store_true", help="a model that repeats itself, and an MTP module")
    args = parser.parse_args()
    if args.action == "checkpoint":
        write_checkpoint(SHAPES[args.shape], args.output, seed=args.seed, drafter=args.drafter)
    else:
        build(SHAPES[args.shape], args.checkpoint, args.output, engine=not args.no_engine, drafter=args.drafter)


if __name__ == "__main__":
    main()
