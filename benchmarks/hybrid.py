"""Qwen3.5 shapes on a GPU: decode steps of 1 and of 4 rows against the bandwidth floor, with and without three drafts;
prefill; what the kernels are.

python benchmarks/hybrid.py export --shape 0.8b --directory D    (torch; any machine)
python benchmarks/hybrid.py build  --directory D                 (TensorRT-RTX, onnx)
python benchmarks/hybrid.py run    --directory D --output benchmarks/results/hybrid-0.8b.json
python benchmarks/hybrid.py deepen --results A.json B.json --output ...   (runs of two cut stacks → the whole depth)

Random weights: shapes decide time and memory. A step of 4 rows is what three drafts cost the decoder, whatever of them
is accepted; its floor reads the weights once, as that of one row does.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import PRECISION_BYTES, copy_bandwidth, sparse_weights, weights_size
from decode import kernel_table, parse_cell, prefill_ms, steps_of
from drafting import step_ms
from edgert.cells import Cell
from environment import environment, saved

CONFIGS = Path(__file__).parent.parent / "tests" / "data" / "configs"
CELLS = (Cell("decode", 1, 1, 768), Cell("decode", 1, 4, 768), Cell("prefill", 1, 512, 2048))
PROMPT, DRAFTS = 2048, 3
WHAT = "Qwen3.5 shapes, random weights, float16, batch 1, 600-700 tokens of context; host one step ahead, captured"


def read_config(shape: str, layers: int | None) -> Any:
    """The published configuration; `layers` cuts the stack."""
    from edgebuild.models.config import ModelConfig

    raw = json.loads((CONFIGS / f"qwen3.5-{shape}.json").read_text(encoding="utf-8"))
    if layers is not None:
        raw["text_config"]["num_hidden_layers"] = layers
    return ModelConfig.from_hf(raw)


def export(
    shape: str, directory: Path, *, cache_tokens: int, layers: int | None, forms: Mapping[str, Any], draft_tokens: int
) -> None:
    """decoder.onnx in float16 with a data file of the right size and no content (sparse), and info.json; mtp.onnx with
    `draft_tokens` tokens that may be drafted, 0 = none."""
    from dataclasses import replace

    import torch
    from edgebuild.export import FORMS, decoder, mtp
    from edgebuild.models.decoder import Decoder
    from edgebuild.models.mtp_config import expected_mtp_tensors

    config = read_config(shape, layers)
    with torch.device("meta"):
        module = Decoder(config, cache_tokens=cache_tokens, token_limit=config.vocabulary_size, dtype=torch.float16)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    shapes |= expected_mtp_tensors(config)

    class Nothing:
        def read(self, name: str) -> torch.Tensor:
            return torch.zeros((), dtype=torch.float16).expand(shapes[name])

    directory.mkdir(parents=True, exist_ok=True)
    chosen, common = replace(FORMS["tensorrt-rtx"], **forms), {"cache_tokens": cache_tokens, "precision": "float16"}
    drafter: Any = ()
    with sparse_weights():
        if draft_tokens:
            own = replace(chosen, processors=0)  # as a build leaves the drafter's products
            made = mtp.export_mtp(config, Nothing(), directory, draft_tokens=range(draft_tokens), forms=own, **common)
            drafter = made.states
        graph = decoder.export_decoder(
            config, Nothing(), directory, token_limit=config.vocabulary_size, forms=chosen,
            drafting=bool(draft_tokens), **common,
        )  # fmt: skip
    states, drafts = ([(s.name, s.kind, s.dtype, s.shape) for s in each] for each in (graph.states, drafter))
    info = {"shape": shape, "layers": config.layers, "cache_tokens": cache_tokens, "states": states}
    info |= {"draft_states": drafts, "draft_tokens": draft_tokens}
    (directory / "info.json").write_text(json.dumps(info))


def fill(graph: Path, seed: int = 0) -> None:
    """Random content for every external tensor of an ONNX file, in its own type."""
    import onnx

    model = onnx.load(str(graph), load_external_data=False)
    rng = np.random.default_rng(seed)
    noise = (rng.standard_normal(1 << 22) * 0.02).astype(np.float32)
    halves = noise.astype(np.float16)
    with graph.with_suffix(".weights").open("wb") as file:
        for tensor in model.graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if not place:
                continue
            file.seek(int(place["offset"]))
            source = noise if onnx.TensorProto.DataType.Name(tensor.data_type) == "FLOAT" else halves
            count, start = int(np.prod(tensor.dims)), int(rng.integers(0, 1 << 20))
            while count:
                part = source[start : start + count]
                file.write(part.tobytes())
                count, start = count - len(part), 0
        file.truncate(weights_size(model))


def build(directory: Path, cells: Sequence[Cell]) -> dict[str, Any]:
    from edgebuild.engine.tensorrt import build_drafter_engine, build_engine

    for graph in directory.glob("*.onnx"):
        fill(graph)
        graph.with_suffix(".plan").unlink(missing_ok=True)
    built = build_engine(directory / "decoder.onnx", directory / "decoder.plan", cells)
    if (drafter := directory / "mtp.onnx").exists():
        cache_tokens = json.loads((directory / "info.json").read_text())["cache_tokens"]
        build_drafter_engine(drafter, directory / "mtp.plan", cells, draft_length=DRAFTS, cache_tokens=cache_tokens)
    result = {
        "build_s": round(built.seconds, 1),
        "plan_mb": round(built.plan_bytes / 1e6, 1),
        "weights_mb": round(built.weight_bytes / 1e6, 1),
        "plan_over_weights": round(built.plan_bytes / built.weight_bytes, 4),
        "cells": [cell.label for cell in cells],
    }
    (directory / "build.json").write_text(json.dumps(result))
    return result


def floor_bytes(config: Any, context: int) -> dict[str, int]:
    """What a decode step must move: every weight once (the tied table as the head), the cache's tokens, the states read
    and written."""
    return {
        "weights": 2 * config.weight_elements(),
        "kv": context * config.kv_bytes_per_token(2),
        "states": 2 * config.recurrent_bytes_per_slot(2),
    }


def prompt(backend: Any, cell: Cell, tokens: int, repeats: int = 6) -> dict[str, float]:
    """A prompt in chunks of one cell, waited for once."""
    from edgert.step import empty_step

    times = []
    for _ in range(repeats):
        backend.reset_slot(0)
        began, ticket = time.perf_counter(), None
        for start in range(0, tokens, cell.query_rows):
            step = empty_step(cell, 0)
            step.tokens[:], step.length[:] = 11, start
            step.valid[:] = step.forced[:] = cell.query_rows
            ticket = backend.launch(step)
        assert ticket is not None
        ticket.result()
        times.append(time.perf_counter() - began)
    best = float(np.median(times[1:]))
    return {"tokens": tokens, "ms": round(1e3 * best, 3), "tokens_per_s": round(tokens / best, 1)}


def in_order(backend: Any, cell: Cell, context: int) -> list[tuple[str, float]]:
    """Kernels of one captured step in the order in which they ran, with their microseconds."""
    from torch.profiler import ProfilerActivity, profile

    def once() -> None:
        if cell.kind == "decode":
            steps_of(backend, cell, context, 11, ahead=False)
        else:
            prefill_ms(backend, cell, repeats=3)

    once()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        once()
    events = [event for event in recorded.events() if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    runs = 11 if cell.kind == "decode" else 3
    last = events[-(len(events) // runs) :]
    return [(event.name, event.time_range.end - event.time_range.start) for event in last]


def opened(directory: Path, info: Mapping[str, Any], cells: Sequence[Cell]) -> Any:
    """The backend, warm. cells: the first so many of those that the engine was built for."""
    from edgert.backends.base import Setup
    from edgert.backends.tensorrt import TensorRTBackend
    from edgert.manifest_records import StateSpec

    states, drafts = (
        tuple(StateSpec(n, n + ".out", dtype, kind, tuple(shape)) for n, kind, dtype, shape in info.get(key, ()))
        for key in ("states", "draft_states")
    )
    vocabulary = read_config(info["shape"], info["layers"]).vocabulary_size
    options = {"flavour": "tensorrt-rtx"}
    drafting = {"draft_length": DRAFTS, "draft_states": drafts} if drafts else {}
    backend = TensorRTBackend(
        Setup(directory, tuple(cells), 1, info["cache_tokens"], vocabulary, states, options, **drafting)
    )
    backend.warm_up()
    return backend


def kernel_list(folder: Path, report: Mapping[str, Any], label: str) -> Path:
    return folder / f"{report['shape']}-{report['layers']}-{label}.txt"


def lend_kernels(source: Path, directory: Path) -> None:
    """What was compiled for another engine (of fewer layers, say) as this one's JIT cache: kernels with the same text
    are not compiled again. jit_s then tells nothing."""
    from edgert.backends import trt_cache

    own = trt_cache.plan_hash(directory / "decoder.plan")[:16]
    other = trt_cache.plan_hash(source / "decoder.plan")[:16]
    for cache in trt_cache.places(source)[0].glob(f"*-{other}.jit"):
        target = trt_cache.places(directory)[0] / cache.name.replace(other, own)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copyfile(cache, target)


def run(
    directory: Path,
    cells: Sequence[Cell],
    context: int,
    count: int,
    kernels: Path | None,
    keep: Callable[[Mapping[str, Any]], object],
) -> dict[str, Any]:
    """keep: called with the report so far after each cell and each table of kernels.

    The engine is opened once a cell with one cell more, so that what a cell's kernels take to compile (jit_s: minutes,
    perhaps) delays no cell before it and is in the JIT cache when the time is up.
    """
    info = json.loads((directory / "info.json").read_text())
    config = read_config(info["shape"], info["layers"])
    bandwidth = copy_bandwidth()
    parts = floor_bytes(config, context + 50)
    floor = 1e3 * sum(parts.values()) / bandwidth
    report: dict[str, Any] = {
        "shape": info["shape"], "layers": config.layers, "context_tokens": context,
        "copy_bandwidth_gb_s": round(bandwidth / 1e9, 1), "floor_ms": round(floor, 4), "floor_bytes": parts,
        "drafter_bytes": drafter_bytes(config, info["draft_tokens"]) if info.get("draft_states") else 0,
        "build": json.loads((directory / "build.json").read_text()), "cells": {},
    }  # fmt: skip
    backend: Any = None
    for number, cell in enumerate(cells, 1):
        if backend is not None:
            backend.close()
        backend = opened(directory, info, cells[:number])
        described = backend.describe()
        report |= {key: described[key] for key in ("device", "scratch_bytes_by_cell", "timings", "fallbacks", "graphs")}
        report["memory"] = backend.memory()
        entry = report["cells"].setdefault(cell.label, {"jit_s": described["jit_s"][cell.label]})
        if cell.kind == "prefill":
            entry |= {"chunk_ms": prefill_ms(backend, cell), "prompt": prompt(backend, cell, PROMPT)}
        else:
            entry["waited"] = steps_of(backend, cell, context, count, ahead=False)
            entry["ahead"] = steps_of(backend, cell, context, count, ahead=True)
            entry["over_floor"] = round(entry["ahead"]["step_ms"] / floor, 3)
            if info.get("draft_states") and cell.query_rows > DRAFTS:
                entry["drafting_ms"] = round(step_ms(backend, cell, DRAFTS, count, ahead=True), 4)
        keep(report)
    for cell in cells if kernels is not None else ():
        assert kernels is not None
        if cell.kind == "decode":
            report["cells"][cell.label]["kernels"] = kernel_table(backend, cell, context)
            keep(report)
        kernels.mkdir(parents=True, exist_ok=True)
        listed = [f"{us:.2f} {name}" for name, us in in_order(backend, cell, context)]
        kernel_list(kernels, report, cell.label).write_text("\n".join(listed))
        report["cells"][cell.label]["us_by_part"] = time_by_part(listed, config.layers)
        keep(report)
    backend.close()
    return report


def time_by_part(kernels: Sequence[str], layers: int) -> dict[str, float]:
    """us a step by part of the model, from its kernels in order ("us name").

    A layer is norm, mixer, norm, feed-forward, and TensorRT makes the norms, with the residual before them, kernels of
    their own: they part the list. Attention has a softmax, GDN a cumulative sum of its decay. The head and the sampling
    follow the last feed-forward's activation, some kernels behind it. Raises ValueError where the count of layers is
    another than the model's.
    """
    pieces: list[list[tuple[float, str]]] = [[]]
    for line in kernels:
        us, name = line.split(" ", 1)
        if re.search(r"MulMeanAddSqrtDivMulMulCast_", name):
            pieces.append([])
        pieces[-1].append((float(us), name))
    # from the first product after the last activation's own (down), that is: everything past it is not the layer's
    last = pieces.pop()
    products = [place for place, (_, name) in enumerate(last) if "matMul" in name]
    pieces += [last[: products[1] + 1], last[products[1] + 1 :]]  # gate and up, down; then the rest
    parts = {"gdn": 0.0, "attention": 0.0, "feed_forward": 0.0, "head_and_rest": 0.0}
    found = {"gdn": 0, "attention": 0, "feed_forward": 0}
    for place, piece in enumerate(pieces):
        names = " ".join(name for _, name in piece)
        part = "head_and_rest"
        if 0 < place < len(pieces) - 1:
            part = "feed_forward" if place % 2 == 0 else "attention" if "MaxrSubExp" in names else "gdn"
            found[part] += 1
        parts[part] += sum(us for us, _ in piece)
    if found["gdn"] + found["attention"] != layers or found["feed_forward"] != layers or "SiluMul" in names:
        raise ValueError(f"the kernels hold {found}, the model has {layers} layers")
    return {part: round(us, 1) for part, us in parts.items()}


def drafter_bytes(config: Any, draft_tokens: int) -> int:
    """What one pass of the drafter reads: its layer, and the head's rows of the tokens that may be drafted."""
    from edgebuild.models.mtp_config import expected_mtp_tensors

    layer = sum(math.prod(shape) for shape in expected_mtp_tensors(config).values())
    return PRECISION_BYTES * (layer + draft_tokens * config.hidden_size)


def deepen(fewer: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The published depth from two cut stacks: what the layers between them take, as often as the rest holds them.

    Layers of a kind take the same time; embedding, head and sampling are in both. An error of the difference counts
    `times` over.
    """
    config = read_config(more["shape"], None)
    gained = more["layers"] - fewer["layers"]
    times = (config.layers - more["layers"]) / gained
    parts = floor_bytes(config, more["context_tokens"] + 50)
    floor = sum(parts.values()) / more["copy_bandwidth_gb_s"] / 1e6

    def at_depth(*path: str) -> float:
        low, high = fewer["cells"], more["cells"]
        for key in path:
            low, high = low[key], high[key]
        return round(high + times * (high - low), 4)

    report: dict[str, Any] = {
        "shape": more["shape"], "layers": config.layers, "context_tokens": more["context_tokens"],
        "derived_from_layers": [fewer["layers"], more["layers"]], "times": times, "device": more["device"],
        "copy_bandwidth_gb_s": more["copy_bandwidth_gb_s"], "floor_ms": round(floor, 4), "floor_bytes": parts,
        "drafter_bytes": more["drafter_bytes"], "cells": {},
    }  # fmt: skip
    for label in (label for label in more["cells"] if label in fewer["cells"]):
        if "prompt" in more["cells"][label]:
            ms = at_depth(label, "prompt", "ms")
            prompt_of = {"tokens": PROMPT, "ms": ms, "tokens_per_s": round(1e3 * PROMPT / ms, 1)}
            report["cells"][label] = {"chunk_ms": at_depth(label, "chunk_ms"), "prompt": prompt_of}
            continue
        ahead = at_depth(label, "ahead", "step_ms")
        report["cells"][label] = {
            "waited": {"step_ms": at_depth(label, "waited", "step_ms")},
            "ahead": {"step_ms": ahead},
            "over_floor": round(ahead / floor, 3),
        }
        if "drafting_ms" in more["cells"][label]:
            # the drafter's passes do not depend on the depth
            passes = more["cells"][label]["drafting_ms"] - more["cells"][label]["ahead"]["step_ms"]
            report["cells"][label]["drafting_ms"] = round(ahead + passes, 4)
    return report


def rows_of(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row a cell, for docs/benchmarks.md.

    drafts_cost: the drafter's passes over a step of one row; drafts_bytes: what they read over the decoder's bytes.
    """
    rows = []
    plain = next((entry["ahead"]["step_ms"] for entry in measured["cells"].values() if "ahead" in entry), None)
    for label, entry in measured["cells"].items():
        row: dict[str, Any] = {"shape": measured["shape"], "layers": measured["layers"], "cell": label}
        if "us_by_part" in entry:
            row["gdn_share"] = round(entry["us_by_part"]["gdn"] / sum(entry["us_by_part"].values()), 3)
        if "derived_from_layers" in measured:
            row["derived_from"] = " and ".join(map(str, measured["derived_from_layers"])) + " layers"
        if "prompt" in entry:
            row |= {"step_ms": entry["chunk_ms"], "prompt_ms": entry["prompt"]["ms"]}
            rows.append(row | {"prompt_tokens": PROMPT, "tokens_per_s": entry["prompt"]["tokens_per_s"]})
            continue
        row |= {"step_ms": entry["ahead"]["step_ms"], "waited_ms": entry["waited"]["step_ms"]}
        if "drafting_ms" in entry:
            row["with_3_drafts_ms"] = entry["drafting_ms"]
            row["drafts_cost"] = round((entry["drafting_ms"] - entry["ahead"]["step_ms"]) / plain, 3)
            row["drafts_bytes"] = round(DRAFTS * measured["drafter_bytes"] / measured["floor_bytes"]["weights"], 3)
        rows.append(row | {"floor_ms": measured["floor_ms"], "over_floor": entry["over_floor"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["export", "build", "run", "deepen", "shares"])
    parser.add_argument("--directory", type=Path, help="needed but for deepen and shares")
    parser.add_argument(
        "--results", type=Path, nargs="+", help="deepen: two results of run, fewer layers first; shares: one"
    )
    parser.add_argument("--shape", choices=["0.8b", "2b", "4b", "9b"], default="0.8b")
    parser.add_argument("--layers", type=int, help="fewer layers than published")
    parser.add_argument(
        "--forms", type=json.loads, default={"processors": 132}, help='fields of Forms, such as {"delta": "looped"}'
    )
    parser.add_argument("--draft-tokens", type=int, default=32768, help="export: that may be drafted; 0 = no drafter")
    parser.add_argument("--cache-tokens", type=int, default=2560)
    parser.add_argument("--cells", nargs="+", type=parse_cell, default=list(CELLS))
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kernels", type=Path, help="folder for the kernels in order; needs torch")
    parser.add_argument(
        "--kernels-from", type=Path, help="run: another --directory that ran before; takes its JIT cache"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    def shown(measured: Mapping[str, Any]) -> dict[str, Any]:
        rest = {key: value for key, value in measured.items() if key != "device"}
        found = environment("tensorrt-rtx-cu13", "cuda-bindings", "numpy", device=measured["device"])
        return {"what": WHAT, **found, "rows": rows_of(rest), "measured": rest}

    if args.action == "export":
        sizes = {"cache_tokens": args.cache_tokens, "layers": args.layers, "draft_tokens": args.draft_tokens}
        export(args.shape, args.directory, forms=args.forms, **sizes)
        return
    if args.action == "build":
        result = build(args.directory, args.cells)
    elif args.action == "deepen":
        parts = [json.loads(path.read_text()) for path in args.results]
        whole = deepen(*(part["measured"] | {"device": part["device"]} for part in parts))
        # where it was measured, not where it was put together
        measured_at = {key: parts[1][key] for key in ("device", "versions", "clocks", "commit") if key in parts[1]}
        result = shown(whole) | measured_at | {"parts": parts}
    elif args.action == "shares":  # of lists that an earlier run left in --kernels
        (path,) = args.results
        result = json.loads(path.read_text())
        measured = result["measured"]
        for label, entry in measured["cells"].items():
            listed = kernel_list(args.kernels, measured, label).read_text().splitlines()
            entry["us_by_part"] = time_by_part(listed, measured["layers"])
        result["rows"] = rows_of(measured)
    else:
        if args.kernels_from is not None:
            lend_kernels(args.kernels_from, args.directory)
        keep: Callable[[Mapping[str, Any]], object] = lambda report: saved(shown(report), args.output)  # noqa: E731
        result = shown(run(args.directory, args.cells, args.context, args.steps, args.kernels, keep))
    sys.stdout.write(saved(result, args.output))


if __name__ == "__main__":
    main()
