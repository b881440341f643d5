"""Artifacts of a model's shape with random weights: every file that a real one has, through the real build.

python benchmarks/shape_artifacts.py checkpoint --shape 0.6b --output DIR     (numpy; the same bytes everywhere)
python benchmarks/shape_artifacts.py build --shape 0.6b --checkpoint DIR --output ARTIFACT [--no-engine]

Random weights are enough for time, memory and the agreement of one way to run with another; they say nothing of text.
The cells are named here and not planned, so that chunked and one-shot prefill stand in one engine.
"""

from __future__ import annotations

import argparse
import json
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
GOLDEN_PROMPT = 23  # tokens: one short prompt, since the reference reads every weight in float32
GOLDEN_TOLERANCE = 5e-2  # random weights in float16: the check is that nothing is out of place, not how well it rounds


def write_checkpoint(shape: Shape, directory: Path, *, seed: int = 0) -> None:
    """A Hugging Face directory: config, tokenizer of single bytes and fillers, float16 safetensors."""
    from edgebuild.models.config import ModelConfig

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config() | {"eos_token_id": shape.vocabulary - 1}))
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer(shape.vocabulary)))
    rng = np.random.default_rng(seed)
    noise = np.tile((rng.standard_normal(NOISE) * 0.02).astype(np.float16), 2)
    header: dict[str, Any] = {}
    end = 0
    expected = ModelConfig.from_hf(shape.config()).expected_tensors()
    for name, dims in expected.items():
        size = 2 * int(np.prod(dims))
        header[name] = {"dtype": "F16", "shape": list(dims), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dims in expected.items():
            count = int(np.prod(dims))
            if "norm" in name:
                file.write(np.ones(count, np.float16).tobytes())
                continue
            start = int(rng.integers(0, NOISE))
            while count:
                part = noise[start : start + min(count, NOISE)]
                file.write(part.data)
                count -= len(part)


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


def cells_of(shape: str) -> tuple[Cell, ...]:
    """Chunks of 512 at several tiers, one chunk of 4,096, and decode for one and for four sequences."""
    return (
        *(Cell("prefill", 1, CHUNK, tier) for tier in PREFILL_TIERS[shape]),
        Cell("prefill", 1, ONE_SHOT, ONE_SHOT),
        *(Cell("decode", batch, 2, tier) for batch, tier in DECODE[shape]),
    )


def build(shape: Shape, checkpoint: Path, output: Path, *, engine: bool) -> None:
    """The real build, with the cells above in place of the planned ones."""
    from edgebuild import build as building
    from edgebuild import golden
    from edgebuild.plan.cells import PlannedCell
    from edgebuild.plan.memory import cache_tokens
    from edgebuild.profile import load_profile
    from edgebuild.progress import Stages
    from edgebuild.traffic import read_traffic

    cells = cells_of(shape.name)
    context = max(cell.kv_tier for cell in cells if cell.kind == "decode")
    base = load_profile("h200")
    assert base.traffic is not None
    limits = base.limits.model_copy(update={"context_tokens": context, "max_chunk": CHUNK, "min_chunk": CHUNK})
    profile = base.model_copy(update={"name": "h200", "limits": limits})
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
    args = parser.parse_args()
    if args.action == "checkpoint":
        write_checkpoint(SHAPES[args.shape], args.output, seed=args.seed)
    else:
        build(SHAPES[args.shape], args.checkpoint, args.output, engine=not args.no_engine)


if __name__ == "__main__":
    main()
