"""Complete TensorRT plans for a machine that only small files reach: without the weights inside them.

python benchmarks/travel.py pack ARTIFACT FILE.tgz --checkpoint C [--mtp HEAD]      here, where the engines were built
python benchmarks/travel.py unpack FILE.tgz ARTIFACT --checkpoint C [--mtp HEAD]    there; every hash is checked
python benchmarks/travel.py pack SHAPE FILE.tgz                a folder of decode.py, drafting.py or hybrid.py
python benchmarks/travel.py unpack FILE.tgz SHAPE              its random weights are made again

A plan holds its weights byte for byte, some of them merged and transposed, and beside them the same kernels once a
profile, which compress seventyfold. Each weight is looked for row by row, so that it does not matter beside which
others the engine laid it: its rows then stand a constant distance apart. What is not found simply travels. A packed
plan is unpacked for it, and packed again there.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import mmap
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from edgert.backends.trt_plan import PackedPlan, is_packed, pack_plan

INDEX, PAGE = "plans.json", 4096
LEAST = 65_536  # smaller tensors are not worth a search
PROBE = 64
FARTHEST = 16  # rows of one weight stand at most so many rows apart
TRIES = 400  # places where a first row may seem to stand
Bytes = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]
Tensors = Mapping[str, Callable[[], Array]]
# offset, distance of rows, bytes of a row, rows; tensor, transposed, part, parts (of its columns)
Block = tuple[int, int, int, int, str, bool, int, int]


def tensors_of(folder: Path, checkpoint: Path | None, head: Path | None) -> dict[str, Tensors]:
    """Plan → its weights by name, as they stand in the ONNX file's data."""
    if not (folder / "manifest.json").exists():
        plans = sorted(folder.glob("**/*.plan"))
        return {str(plan.relative_to(folder)): _of_onnx(plan.with_suffix(".onnx")) for plan in plans}
    from edgebuild.checkpoint import open_checkpoint
    from edgebuild.drafter import find_drafter
    from edgebuild.models.config import ModelConfig
    from edgebuild.models.mtp_config import expected_mtp_tensors
    from edgebuild.restore import decoder_tensors
    from edgert.manifest import load_manifest

    if checkpoint is None:
        raise SystemExit("an artifact needs --checkpoint")
    manifest, opened = load_manifest(folder), open_checkpoint(checkpoint)
    config = ModelConfig.from_hf(opened.config)
    decoder = {
        name: lambda read=read: read().detach().contiguous().numpy()
        for name, read in decoder_tensors(config, manifest, opened.read).items()
    }
    found: dict[str, Tensors] = {"decoder.plan": decoder}
    if manifest.draft_length:
        weights = find_drafter(opened, config, head)
        if weights is None:
            raise SystemExit("this artifact drafts: give its head, --mtp HEAD")
        rows = np.array(weights.draft_tokens(manifest.model.token_limit, manifest.draft_vocabulary))
        dtype = np.dtype(manifest.backend.precision)
        tables = ("model.embed_tokens.weight", *(() if config.tie_word_embeddings else ("lm_head.weight",)))
        drafter: dict[str, Callable[[], Array]] = {
            name: lambda name=name: weights.read(name).numpy().astype(dtype) for name in expected_mtp_tensors(config)
        }
        drafter |= {name: lambda name=name: weights.read(name).numpy()[rows].astype(dtype) for name in tables}
        drafter |= {name: read for name, read in decoder.items() if name.startswith("rope")}
        found["mtp.plan"] = drafter
    return found


def _of_onnx(graph: Path) -> Tensors:
    """The external tensors of an ONNX file beside its data."""
    import onnx

    data = np.memmap(graph.with_suffix(".weights"), np.uint8, "r")

    def reader(offset: int, dtype: np.dtype[Any], dims: tuple[int, ...]) -> Callable[[], Array]:
        end = offset + dtype.itemsize * int(np.prod(dims))
        return lambda: data[offset:end].view(dtype).reshape(dims)

    found = {}
    for tensor in onnx.load(str(graph), load_external_data=False).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place:
            kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            found[tensor.name] = reader(int(place["offset"]), kind, tuple(tensor.dims))
    return found


def matrix(value: Array, transposed: bool, part: int, parts: int) -> Bytes:
    """Rows of bytes of a tensor [rows, columns], or of one of `parts` equal slices of its columns."""
    whole = value.reshape(-1, value.shape[-1])
    whole = whole.T if transposed else whole
    width = whole.shape[1] // parts
    cut = np.ascontiguousarray(whole[:, part * width : (part + 1) * width])
    return cut.view(np.uint8).reshape(cut.shape[0], -1)


class Search:
    """Finds tensors in a plan; what was found once is not found again."""

    def __init__(self, plan: Path) -> None:
        self._file = plan.open("rb")
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._whole = np.frombuffer(self._map, np.uint8)
        self.blocks: list[Block] = []
        self._last = 0  # weights stand in the order of the graph, more or less
        self._ways: dict[str, tuple[bool, int]] = {}

    def find(self, name: str, value: Array, most_parts: int = 4) -> None:
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        ways = [(transposed, parts) for parts in (1, 2, 4) if parts <= most_parts for transposed in (True, False)]
        known = self._ways.get(kind)
        for transposed, parts in sorted(ways, key=lambda way: way != known):
            columns = value.reshape(-1, value.shape[-1]).shape[0 if transposed else 1]
            if columns % parts:
                continue
            before = len(self.blocks)
            for part in range(parts):
                if not self._one(name, matrix(value, transposed, part, parts), transposed, part, parts):
                    break
            if len(self.blocks) - before == parts:
                self._ways[kind] = (transposed, parts)
                return
            del self.blocks[before:]

    def _one(self, name: str, rows: Bytes, transposed: bool, part: int, parts: int) -> bool:
        for at in self._places(rows[0]):
            distance = self._distance(at, rows)
            if distance is None or at + distance * (len(rows) - 1) + rows.shape[1] > self._whole.size:
                continue
            if np.array_equal(strided(self._whole, at, distance, rows.shape), rows):
                self.blocks.append((at, distance, rows.shape[1], len(rows), name, transposed, part, parts))
                self._last = at
                return True
        return False

    def _places(self, row: Bytes) -> Iterator[int]:
        """Where a row stands that no block has yet, from the last one on, then from the beginning."""
        probe, tries = row[:PROBE].tobytes(), 0
        for begin, end in ((self._last, len(self._map)), (0, self._last + PROBE)):
            at = begin - 1
            while tries < TRIES and (at := self._map.find(probe, at + 1, end)) >= 0:
                tries += 1
                if not self._taken(at) and np.array_equal(self._whole[at : at + row.size], row):
                    yield at

    def _taken(self, at: int) -> bool:
        return any(
            start <= at < start + step * count and (at - start) % step < width
            for start, step, width, count, *_ in self.blocks
        )

    def _distance(self, at: int, rows: Bytes) -> int | None:
        """From the first row to the second."""
        if len(rows) == 1:
            return rows.shape[1]
        width = rows.shape[1]
        second, low = rows[1].tobytes(), at + width
        probe, high = second[:PROBE], at + FARTHEST * width + PROBE
        while (found := self._map.find(probe, low, high)) >= 0:
            if self._map[found : found + width] == second:
                return int(found) - at
            low = found + 1
        return None


def strided(whole: Bytes, at: int, distance: int, shape: tuple[int, ...]) -> Bytes:
    """Rows of bytes that stand a constant distance apart; a view."""
    return np.lib.stride_tricks.as_strided(whole[at:], shape, (distance, 1))


def blocks_of(plan: Path, tensors: Tensors) -> list[Block]:
    search = Search(plan)
    values = {name: read for name, read in tensors.items() if read().ndim >= 2 and read().nbytes >= LEAST}
    first = max(values, key=lambda name: values[name]().nbytes, default=None)  # random weights repeat inside it
    for name in sorted(values, key=lambda name: name != first):
        search.find(name, values[name]())
    return [*search.blocks, *_once_more(plan, search.blocks, values)]


def _once_more(plan: Path, blocks: list[Block], values: Tensors) -> list[Block]:
    """Weights that some profiles have a second time. Looked for in the pages that are left, put together."""
    pages, used = pages_of(without(plan, blocks))
    places = np.flatnonzero(used)
    with tempfile.NamedTemporaryFile() as rest:
        pages[used].tofile(rest.name)
        again = Search(Path(rest.name))
        for name, read in values.items():
            again.find(name, read(), most_parts=1)
    found = []
    for at, distance, width, count, *how in again.blocks:
        first, last = at // PAGE, (at + distance * (count - 1) + width - 1) // PAGE
        if places[last] - places[first] == last - first:
            found.append((int(places[first]) * PAGE + at % PAGE, distance, width, count, *how))
    return found  # type: ignore[return-value]


def without(plan: Path, blocks: list[Block]) -> Bytes:
    """The plan with zeros where the blocks stand."""
    whole = np.fromfile(plan, np.uint8)
    for at, distance, width, count, *_ in blocks:
        strided(whole, at, distance, (count, width))[:] = 0
    return whole


def pages_of(whole: Bytes) -> tuple[Bytes, npt.NDArray[np.bool_]]:
    """[pages, PAGE], and which of them are not zero."""
    pages = np.zeros((-(-whole.size // PAGE), PAGE), np.uint8)
    pages.reshape(-1)[: whole.size] = whole
    return pages, pages.any(axis=1)


def rest_of(plan: Path, blocks: list[Block]) -> tuple[bytes, bytes, bytes]:
    """(bitmap of pages, those pages, sha256): what is left when the blocks are zero."""
    digest = hashlib.sha256(plan.read_bytes()).digest()
    whole = without(plan, blocks)
    pages, used = pages_of(whole)
    return np.packbits(used).tobytes(), pages[used].tobytes(), digest


@contextmanager
def unpacked(plan: Path) -> Iterator[Path]:
    """The plan as TensorRT made it: the file itself, or one that lasts as long."""
    if not is_packed(plan):
        yield plan
        return
    with tempfile.NamedTemporaryFile(suffix=".plan") as file, closing(PackedPlan(plan)) as packed:
        while block := packed.read(file.tell(), packed.size):
            file.write(block)
        file.flush()
        yield Path(file.name)


def pack(folder: Path, target: Path, checkpoint: Path | None, head: Path | None) -> None:
    index: dict[str, Any] = {}
    files: list[tuple[str, bytes]] = []
    for number, (name, tensors) in enumerate(tensors_of(folder, checkpoint, head).items()):
        with unpacked(folder / name) as plan:
            blocks = blocks_of(plan, tensors)
            used, rest, digest = rest_of(plan, blocks)
            size = plan.stat().st_size
        packed = lzma.compress(used + rest, preset=1)
        index[name] = {"bytes": size, "sha256": digest.hex(), "file": f"{number}.xz", "blocks": blocks}
        index[name]["packed"] = is_packed(folder / name)
        files.append((f"{number}.xz", packed))
        found = sum(width * count for _, _, width, count, *_ in blocks)
        print(f"{name}: {size:,} bytes, {found:,} of them in {len(blocks)} blocks of weights, {len(packed):,} packed")
    with tarfile.open(target, "w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(folder))
            if path.is_file() and path.suffix not in (".plan", ".weights") and not path.name.startswith("."):
                archive.add(path, name)
        for name, data in ((INDEX, json.dumps(index).encode()), *files):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def fill_shape(folder: Path) -> None:
    """The weights of a benchmark's shape, as its `build` writes them."""
    import hybrid
    from common import fill_weights

    hybrids = "layers" in json.loads((folder / "info.json").read_text())
    for graph in sorted(folder.glob("**/*.onnx")):
        if hybrids:
            hybrid.fill(graph)
        else:
            fill_weights(graph, graph.with_suffix(".weights"))


def unpack(source: Path, folder: Path, checkpoint: Path | None, head: Path | None) -> None:
    """Stops where a plan is not the one that was packed: another checkpoint, other random numbers."""
    folder.mkdir(parents=True)
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    for name in index:
        (folder / name).touch()
    artifact = (folder / "manifest.json").exists()
    if not artifact:
        fill_shape(folder)
    tensors = tensors_of(folder, checkpoint, head)
    for name, entry in index.items():
        count = -(-entry["bytes"] // PAGE)
        data = lzma.decompress((folder / entry["file"]).read_bytes())
        used = np.unpackbits(np.frombuffer(data[: -(-count // 8)], np.uint8), count=count).astype(bool)
        whole = np.zeros((count, PAGE), np.uint8)
        whole[used] = np.frombuffer(data[-(-count // 8) :], np.uint8).reshape(-1, PAGE)
        plan = whole.reshape(-1)[: entry["bytes"]]
        for at, distance, width, rows, tensor, transposed, part, parts in entry["blocks"]:
            strided(plan, at, distance, (rows, width))[:] = matrix(tensors[name][tensor](), transposed, part, parts)
        if hashlib.sha256(plan.data).hexdigest() != entry["sha256"]:
            raise SystemExit(f"{name}: not the plan that was packed; other weights, or another numpy")
        if entry.get("packed"):
            (folder / name).unlink()
            pack_plan(plan, folder / name)
        else:
            plan.tofile(folder / name)
        (folder / entry["file"]).unlink()
    (folder / INDEX).unlink()
    for path in () if artifact else folder.glob("**/*.weights"):
        path.unlink()
    print(f"{folder}: whole")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["pack", "unpack"])
    parser.add_argument("first", type=Path, help="pack: a folder; unpack: a file")
    parser.add_argument("last", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--mtp", type=Path)
    args = parser.parse_args()
    (pack if args.action == "pack" else unpack)(args.first, args.last, args.checkpoint, args.mtp)


if __name__ == "__main__":
    main()
