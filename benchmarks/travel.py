"""A complete TensorRT artifact for a machine that only small files reach: without the weights inside its plan.

python benchmarks/travel.py pack ARTIFACT CHECKPOINT FILE.tgz       here, where the engine was built
python benchmarks/travel.py unpack FILE.tgz CHECKPOINT ARTIFACT     there; every hash of the manifest is checked

A plan holds its weights byte for byte, some of them merged (q, k, v; gate, up) and transposed, and beside them the same
kernels once a profile, which compress seventyfold. SmolLM2's plan of 339 MB travels as 1.6 MB. Reads plans of dense
models without a drafter; what is not recognised simply travels.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import lzma
import mmap
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from edgebuild.checkpoint import open_checkpoint
from edgebuild.models.config import ModelConfig
from edgebuild.restore import decoder_tensors
from edgert.integrity import check_files
from edgert.manifest import load_manifest

PLAN, BLOCKS, REST = "decoder.plan", "blocks.json", "rest.xz"
LEAST = 65_536  # smaller tensors are not worth a search
PROBE, HEAD = 64, 4096
Bytes = npt.NDArray[np.uint8]
Tensors = Mapping[str, Callable[[], torch.Tensor]]
Block = tuple[int, int, list[str], str]  # offset and bytes in the plan, tensors, how they are put together
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def tensors_of(artifact: Path, checkpoint: Path) -> Tensors:
    """The decoder's tensors in the artifact's precision, by name."""
    opened = open_checkpoint(checkpoint)
    return decoder_tensors(ModelConfig.from_hf(opened.config), load_manifest(artifact), opened.read)


def content(tensors: Tensors, names: Sequence[str], how: str) -> Bytes:
    """how: plain, rows (one below the other) or columns (transposed, side by side)."""
    parts = [tensors[name]() for name in names]
    whole = parts[0]
    if how == "rows":
        whole = torch.cat(parts, 0)
    elif how == "columns":
        whole = torch.cat([part.t() for part in parts], 1)
    return whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


class Search:
    """Finds tensors in a plan; what was found once is not found again."""

    def __init__(self, plan: Path, tensors: Tensors) -> None:
        self._file = plan.open("rb")
        self.map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._whole = np.frombuffer(self.map, np.uint8)
        self._tensors = tensors
        self.blocks: list[Block] = []

    def find(self, names: Sequence[str], how: str) -> bool:
        wanted = content(self._tensors, names, how)
        if wanted.size < LEAST:
            return False
        probe, at = wanted[:PROBE].tobytes(), -1
        while (at := self.map.find(probe, at + 1)) >= 0:
            inside = next((start + size for start, size, *_ in self.blocks if start <= at < start + size), None)
            if inside is not None:
                at = inside - 1
            elif self._same(at, wanted):
                self.blocks.append((at, wanted.size, list(names), how))
                return True
        return False

    def _same(self, at: int, wanted: Bytes) -> bool:
        found = self._whole[at : at + wanted.size]
        return (
            found.size == wanted.size and np.array_equal(found[:HEAD], wanted[:HEAD]) and np.array_equal(found, wanted)
        )


def merged(names: Sequence[str]) -> Iterator[list[str]]:
    """Projections that an engine may hold as one matrix."""
    for group in GROUPS:
        owners: dict[str, list[str]] = {}
        for name in names:
            owner, _, part = name.removesuffix(".weight").rpartition(".")
            if part in group and name.endswith(".weight"):
                owners.setdefault(owner, []).append(name)
        yield from owners.values()


def pack(artifact: Path, checkpoint: Path, target: Path) -> None:
    tensors = tensors_of(artifact, checkpoint)
    sizes = {name: tensor().numel() for name, tensor in tensors.items() if tensor().dim() == 2}
    search = Search(artifact / PLAN, tensors)
    done = {max(sizes, key=lambda name: sizes[name])}  # the embedding first: random weights repeat inside it
    search.find([*done], "plain")
    last: dict[int, tuple[str, tuple[int, ...]]] = {}
    for group in merged(list(sizes)):
        orders = itertools.product(("columns", "rows"), itertools.permutations(range(len(group))))
        tries = [*([last[len(group)]] if len(group) in last else []), *orders]
        hit = next((t for t in tries if search.find([group[place] for place in t[1]], t[0])), None)
        if hit is not None:
            last[len(group)] = hit
            done.update(group)
    for name in sorted(sizes.keys() - done, key=lambda name: -sizes[name]):
        if not search.find([name], "plain"):
            search.find([name], "columns")
    search.blocks.sort()
    rest, at = io.BytesIO(), 0
    for start, size, *_ in search.blocks:
        rest.write(search.map[at:start])
        at = start + size
    rest.write(search.map[at:])
    packed = lzma.compress(rest.getvalue(), preset=1)
    print(f"{PLAN}: {len(search.map):,} bytes, {len(search.blocks)} blocks of weights, "
          f"{rest.tell():,} bytes left, {len(packed):,} packed")  # fmt: skip
    with tarfile.open(target, "w:gz") as archive:
        for path in sorted(artifact.iterdir()):
            if path.name != PLAN and not path.name.startswith("."):
                archive.add(path, path.name)
        for name, data in ((BLOCKS, json.dumps(search.blocks).encode()), (REST, packed)):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def unpack(source: Path, checkpoint: Path, artifact: Path) -> None:
    """Raises ArtifactError where the checkpoint is another one than that of the build."""
    artifact.mkdir(parents=True)
    with tarfile.open(source) as archive:
        archive.extractall(artifact, filter="data")
    blocks: list[Any] = json.loads((artifact / BLOCKS).read_text())
    rest = lzma.decompress((artifact / REST).read_bytes())
    for name in (BLOCKS, REST):
        (artifact / name).unlink()
    tensors = tensors_of(artifact, checkpoint)
    at = used = 0
    with (artifact / PLAN).open("wb") as plan:
        for start, size, names, how in blocks:
            plan.write(rest[used : used + start - at])
            used += start - at
            plan.write(content(tensors, names, how).data)
            at = start + size
        plan.write(rest[used:])
    check_files(artifact, load_manifest(artifact))
    print(f"{artifact}: whole")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["pack", "unpack"])
    parser.add_argument("first", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("last", type=Path)
    args = parser.parse_args()
    (pack if args.action == "pack" else unpack)(args.first, args.checkpoint, args.last)


if __name__ == "__main__":
    main()
