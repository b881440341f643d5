"""A Hugging Face directory: config.json and safetensors, one file or shards with an index. Nothing is ever unpickled.

Headers are read and checked when the directory is opened; data only by `read`, one tensor at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgebuild.checkpoint.base import Checkpoint, SourceFile, TokenizerFiles
from edgebuild.checkpoint.hf_tokenizer import TOKENIZER_FILES, read_tokenizer_files
from edgebuild.checkpoint.names import canonical_name
from edgebuild.checkpoint.safetensors_header import FLOAT_DTYPES, StoredTensor, read_header
from edgebuild.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_AGAIN = "index and shards are of different revisions: fetch them again"
_TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent.name}: {path.name} is missing", hint="a checkpoint needs it") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not readable JSON: {error}", hint="fetch the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} holds no JSON object")
    return content


class DirectoryCheckpoint(Checkpoint):
    """A checkpoint in the published Hugging Face layout."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        shards, stored = _stored_tensors(path)
        self._tensors: dict[str, StoredTensor] = {}
        skipped = []
        for name, tensor in stored.items():
            flat = canonical_name(name)
            if flat is None:
                skipped.append(name)
            elif flat in self._tensors:
                other = self._tensors[flat].name
                raise CheckpointError(
                    f"{path.name}: {name!r} and {other!r} are both {flat!r}; one of them is a leftover"
                )
            else:
                self._tensors[flat] = tensor
        self.skipped = tuple(sorted(skipped))
        self._refuse_packed()
        beside = ["config.json", "generation_config.json", *TOKENIZER_FILES]
        if len(shards) > 1:
            beside.append(_INDEX)
        present = [path / name for name in beside if (path / name).is_file()]
        self.files = tuple(sorted((SourceFile.at(file) for file in present + shards), key=lambda file: file.name))

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> str:
        return self._stored(name).dtype

    def read(self, name: str) -> torch.Tensor:
        """One tensor in its stored float dtype. Holds that tensor's bytes once; nothing stays mapped."""
        import torch

        tensor = self._stored(name)
        dtype: torch.dtype = getattr(torch, _TORCH_DTYPES[tensor.dtype])
        if not tensor.bytes:
            return torch.empty(tensor.shape, dtype=dtype)
        buffer = bytearray(tensor.bytes)
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            count = file.readinto(buffer)
        if count != tensor.bytes:
            raise CheckpointError(f"{tensor.path.name}: {count} of {tensor.bytes} bytes of {name!r}; the file changed")
        return torch.frombuffer(buffer, dtype=dtype).reshape(tensor.shape)

    def load_tokenizer(self) -> TokenizerFiles:
        return read_tokenizer_files(self.path, {**self.config, **self._section("text_config")})

    def _section(self, key: str) -> dict[str, Any]:
        """An object inside config.json, empty where there is none."""
        section = self.config.get(key)
        return section if isinstance(section, dict) else {}

    def _stored(self, name: str) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self.missing(name)
        return tensor

    def _refuse_packed(self) -> None:
        """Quantised or packed weights: decided per tensor, because ignore lists leave some of them plain."""
        packed = sorted(name for name, tensor in self._tensors.items() if tensor.dtype not in FLOAT_DTYPES)
        if not packed:
            return
        quantization = self._section("quantization_config") or self._section("compression_config")
        method = quantization.get("quant_method", "not named in config.json")
        raise CheckpointError(
            f"{self.path.name}: {len(packed)} of {len(self._tensors)} tensors are quantised (method: {method}), "
            f"for example {packed[0]!r} as {self._tensors[packed[0]].dtype}",
            hint="give the unquantised checkpoint, or a GGUF of it",
        )


def _stored_tensors(path: Path) -> tuple[list[Path], dict[str, StoredTensor]]:
    """The weight files, and every tensor under its stored name; an index is verified against the shards' headers."""
    single = path / _SINGLE
    if not single.is_file():  # where both exist the whole file wins, as in Transformers
        if (path / _INDEX).is_file():
            return _from_index(path)
        found = sorted(file for file in path.glob("*.safetensors") if file.is_file())
        if len(found) != 1:
            raise _no_weights(path, found)
        single = found[0]
    return [single], read_header(single)


def _from_index(path: Path) -> tuple[list[Path], dict[str, StoredTensor]]:
    weight_map = read_json(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{_INDEX} has no weight_map of names to files", hint="fetch the file again")
    shard_names = sorted(set(weight_map.values()))
    for shard in shard_names:
        if Path(shard).name != shard or shard in {"", ".", ".."}:
            raise CheckpointError(f"{_INDEX} names {shard!r}, which is not a file beside it")
    if absent := [shard for shard in shard_names if not (path / shard).is_file()]:
        count = sum(file in absent for file in weight_map.values())
        raise CheckpointError(
            f"{path.name}: {len(absent)} of {len(shard_names)} shards are missing ({', '.join(absent)}), "
            f"with {count} of {len(weight_map)} tensors",
            hint="fetch the missing files",
        )
    stored: dict[str, StoredTensor] = {}
    for shard in shard_names:
        for name, tensor in read_header(path / shard).items():
            if name in stored:
                raise CheckpointError(f"{name!r} is in {stored[name].path.name} and again in {shard}")
            stored[name] = tensor
    for name, shard in weight_map.items():
        if name not in stored:
            raise CheckpointError(f"{_INDEX} puts {name!r} into {shard}, but no shard holds it", hint=_AGAIN)
        if (actual := stored[name].path.name) != shard:
            raise CheckpointError(f"{_INDEX} puts {name!r} into {shard}, but it is in {actual}", hint=_AGAIN)
    for name, tensor in stored.items():
        if name not in weight_map:
            raise CheckpointError(f"{tensor.path.name} holds {name!r}, which {_INDEX} does not list", hint=_AGAIN)
    return [path / shard for shard in shard_names], stored


def _no_weights(path: Path, found: list[Path]) -> CheckpointError:
    if found:
        names = ", ".join(file.name for file in found)
        return CheckpointError(
            f"{path.name}: {len(found)} safetensors files ({names}) and no {_INDEX}", hint="fetch the index"
        )
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern))
    if pickles:
        return CheckpointError(
            f"{path.name}: weights only as {pickles[0]}, a pickle, which can run code when it is loaded",
            hint="take a safetensors revision, or convert it where you trust it with Transformers' "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)",
        )
    return CheckpointError(
        f"{path.name}: no {_SINGLE}, no {_INDEX}", hint="give a Hugging Face directory or a .gguf file"
    )
