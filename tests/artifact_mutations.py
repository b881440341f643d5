"""The ways in which tests/fuzz_artifact.py damages an artifact. Each returns what it did, or raises Neutral.

A mutation is never semantically neutral: scheduler.yaml, which a user may edit, only becomes something impossible.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANIFEST, SCHEDULER = "manifest.json", "scheduler.yaml"
ABSURD: tuple[Any, ...] = (-1, -(2**63), 2**63, 2**70, 1e308, -0.5, 3.7, "12", "", None, True, [], {}, [[]], "NaN")


class Neutral(Exception):
    """The dice gave a change that changes nothing: draw again."""


@dataclass
class Scratch:
    """A copy of the artifact that is put back to its original bytes after each mutation."""

    source: Path
    work: Path
    files: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in sorted(self.source.rglob("*")):
            if path.is_file():
                self.files[path.relative_to(self.source).as_posix()] = path.read_bytes()
        self.restore()

    def restore(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        for name, data in self.files.items():
            path = self.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def manifest(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.files[MANIFEST])
        return document

    def write_manifest(self, document: Any) -> None:
        (self.work / MANIFEST).write_text(json.dumps(document))

    def replace(self, name: str, data: bytes, *, rehash: bool) -> None:
        """Write a file; with `rehash` the manifest is made to match, as someone who repacks an artifact would."""
        (self.work / name).write_bytes(data)
        if rehash:
            document = self.manifest()
            for entry in document["files"]:
                if entry["path"] == name:
                    entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            self.write_manifest(document)


Mutation = Callable[[Scratch, random.Random], str]


def _hashed_files(scratch: Scratch) -> list[str]:
    return [name for name in scratch.files if name not in (MANIFEST, SCHEDULER)]


def cut_file(scratch: Scratch, rng: random.Random) -> str:
    name = rng.choice(_hashed_files(scratch))
    data = scratch.files[name]
    keep = rng.randrange(len(data))
    (scratch.work / name).write_bytes(data[:keep])
    return f"{name} cut to {keep}"


def cut_manifest(scratch: Scratch, rng: random.Random) -> str:
    data = scratch.files[MANIFEST].rstrip()
    keep = rng.randrange(len(data))
    (scratch.work / MANIFEST).write_bytes(data[:keep])
    return f"manifest cut to {keep}"


def flip_bytes(scratch: Scratch, rng: random.Random) -> str:
    name = rng.choice(_hashed_files(scratch))
    data = bytearray(scratch.files[name])
    for _ in range(rng.choice((1, 1, 1, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if bytes(data) == scratch.files[name]:
        raise Neutral
    (scratch.work / name).write_bytes(data)
    return f"{name} flipped"


def append_bytes(scratch: Scratch, rng: random.Random) -> str:
    name = rng.choice([*_hashed_files(scratch), MANIFEST])
    extra = rng.choice((b"\x00", b"}", b"[1]", rng.randbytes(64)))
    with (scratch.work / name).open("ab") as file:
        file.write(extra)
    return f"{name} + {extra[:8]!r}"


def swap_files(scratch: Scratch, rng: random.Random) -> str:
    first, second = rng.sample(_hashed_files(scratch), 2)
    if scratch.files[first] == scratch.files[second]:
        raise Neutral
    (scratch.work / first).write_bytes(scratch.files[second])
    (scratch.work / second).write_bytes(scratch.files[first])
    return f"{first} <-> {second}"


def missing_file(scratch: Scratch, rng: random.Random) -> str:
    name = rng.choice(list(scratch.files))
    (scratch.work / name).unlink()
    return f"{name} missing"


def extra_file(scratch: Scratch, rng: random.Random) -> str:
    name = rng.choice(("extra.bin", "decoder.plan2", "MANIFEST.JSON", "sub/dir/file", "manifest.json.bak", "a b"))
    (scratch.work / name).parent.mkdir(parents=True, exist_ok=True)
    (scratch.work / name).write_bytes(b"x")
    return f"extra {name}"


def not_a_file(scratch: Scratch, rng: random.Random) -> str:
    name = rng.choice(list(scratch.files))
    path = scratch.work / name
    path.unlink()
    kind = rng.choice(("directory", "fifo", "outside link", "dangling link", "loop", "device"))
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "outside link":
        outside = scratch.work.parent / "outside"
        outside.write_bytes(scratch.files[name] if name != MANIFEST else b"[]")
        path.symlink_to(outside)
    else:
        path.symlink_to("/nonexistent/file")
    return f"{name} is a {kind}"


PATHS = (
    "/etc/passwd", "../outside", "a/../../outside", "./decoder.onnx", "decoder.onnx/", "//decoder.onnx", "a\\b",
    "a\x00b",
    "C:\\x", "", ".", "..", "~", "~/x", "decoder.onnx\n", "DECODER.ONNX", "Tokenizer.json", "manifest.json", "a/./b",
    "decoder.onnx/x", "\u202efile", "con\x07", "x" * 300, "-rf", ".hidden", "%2e%2e/x", "file:///etc/passwd", "\ud800",
)  # fmt: skip


def path_trick(scratch: Scratch, rng: random.Random) -> str:
    document = scratch.manifest()
    trick = rng.choice(PATHS)
    entry = rng.choice(document["files"])
    if rng.random() < 0.5:
        entry["path"] = trick
    else:
        document["files"].append({**entry, "path": trick})
    scratch.write_manifest(document)
    return f"path {trick[:20]!r}"


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        found += _places(child, (*path, key))
    return found


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


# free text, and numbers that only describe: another value of the same type is another artifact, not a broken one
FREE = (
    "name",
    "family",
    "edgebuild_version",
    "formula",
    "label",
    "attribution",
    "requests",
    "tools",
    "file",
    "version",
)


def wrong_value(scratch: Scratch, rng: random.Random) -> str:
    """A value of another type, or a number beyond every bound."""
    document = scratch.manifest()
    path = rng.choice(_places(document))
    old = _at(document, path)
    new = copy.deepcopy(rng.choice(ABSURD))
    same_kind = type(new) is type(old)
    if same_kind and not (
        isinstance(new, int) and not isinstance(new, bool) and abs(new) >= 1 and (new < 0 or new > 2**60)
    ):
        raise Neutral
    if path[-1] == "bos_token_id" and new is None:
        raise Neutral
    if (
        isinstance(old, list)
        and new == []
        and path[-1] in ("source", "ledger", "eos_token_ids", "compute_capabilities")
    ):
        raise Neutral
    if any(part in FREE for part in path) and isinstance(old, str) and isinstance(new, str):
        raise Neutral
    _at(document, path[:-1])[path[-1]] = new
    scratch.write_manifest(document)
    return f"{path} = {new!r}"


def contradiction(scratch: Scratch, rng: random.Random) -> str:
    """Numbers of the right type and range that do not agree with each other."""
    document = scratch.manifest()
    cells, states, model = document["cells"], document["states"], document["model"]

    def cell(**changes: Any) -> None:
        rng.choice(cells).update(changes)

    changes: dict[str, Callable[[], Any]] = {
        "slots": lambda: document.update(slots=rng.randrange(1, max(c["batch"] for c in cells))),
        "context": lambda: document.update(context_tokens=document["cache_tokens"] + rng.randrange(1, 99)),
        "cache": lambda: document.update(cache_tokens=document["cache_tokens"] + rng.choice((-1, 1, 4096))),
        "tier": lambda: cell(kv_tier=document["cache_tokens"] + rng.randrange(1, 99)),
        "tier below rows": lambda: cell(query_rows=100, kv_tier=rng.randrange(1, 100)),
        "prefill batch": lambda: cell(kind="prefill", batch=2),
        "duplicate cell": lambda: cells.append(dict(rng.choice(cells))),
        "no decode": lambda: document.update(cells=[c for c in cells if c["kind"] == "prefill"]),
        "no prefill": lambda: document.update(cells=[c for c in cells if c["kind"] == "decode"]),
        "no batch 1": lambda: document.update(cells=[c for c in cells if c["batch"] > 1]),
        "token limit": lambda: model.update(token_limit=model["token_limit"] - rng.randrange(1, 50)),
        "vocabulary": lambda: model.update(vocabulary_size=rng.randrange(1, model["token_limit"])),
        "eos": lambda: model.update(eos_token_ids=[model["vocabulary_size"] + rng.randrange(99)]),
        "state shape": lambda: rng.choice(states).update(shape=[2, rng.randrange(1, 9), 16]),
        "state dtype": lambda: rng.choice(states).update(dtype="int8"),
        "state name": lambda: rng.choice(states).update(input="no such tensor"),
        "state twice": lambda: states.append(dict(rng.choice(states))),
        "state gone": lambda: states.pop(rng.randrange(len(states))),
        "input gone": lambda: document["tensors"]["inputs"].pop(rng.randrange(9)),
        "output gone": lambda: document["tensors"]["outputs"].pop(rng.randrange(5)),
        "input twice": lambda: document["tensors"]["inputs"].append(document["tensors"]["inputs"][0]),
        "input dtype": lambda: document["tensors"]["inputs"][rng.randrange(9)].update(dtype="float16"),
        "file gone from list": lambda: document["files"].pop(rng.randrange(len(document["files"]))),
        "file hash": lambda: rng.choice(_strict(document)).update(sha256=rng.randbytes(32).hex()),
        "file size": lambda: rng.choice(_strict(document)).update(bytes=rng.randrange(1, 1 << 40)),
        "backend": lambda: document["backend"].update(name=rng.choice(("tensorrt", "tensorrt-rtx", "pickle"))),
        "state onnx": lambda: document.update(state="onnx"),
        "newer format": lambda: document.update(format_version=rng.randrange(2, 1 << 20)),
    }
    name = rng.choice(list(changes))
    changes[name]()
    if document == scratch.manifest():
        raise Neutral
    scratch.write_manifest(document)
    return f"contradiction: {name}"


def _strict(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in document["files"] if entry["path"] != SCHEDULER]


def keys(scratch: Scratch, rng: random.Random) -> str:
    """A key removed, misspelt or unknown."""
    document = scratch.manifest()
    objects = [p for p in [(), *_places(document)] if isinstance(_at(document, p), dict) and p[:1] != ("tools",)]
    target = _at(document, rng.choice(objects))
    key = rng.choice(list(target))
    kind = rng.choice(("removed", "misspelt", "unknown"))
    if kind == "unknown":
        target[rng.choice(("__proto__", "__reduce__", "pickle", "extra", ""))] = 1
    else:
        value = target.pop(key)
        if kind == "misspelt":
            target[key[:-1] + "X"] = value
    scratch.write_manifest(document)
    return f"key {key} {kind}"


def duplicate_key(scratch: Scratch, rng: random.Random) -> str:
    lines = scratch.files[MANIFEST].decode().split("\n")
    wanted = [
        n
        for n, line in enumerate(lines)
        if line.strip().startswith('"') and line.rstrip().endswith(",") and '": ' in line
    ]
    at = rng.choice(wanted)
    lines.insert(at, lines[at])
    (scratch.work / MANIFEST).write_text("\n".join(lines))
    return f"duplicate {lines[at].strip()[:30]}"


def hostile_json(scratch: Scratch, rng: random.Random) -> str:
    name = rng.choice((MANIFEST, "golden.json", "tokenizer.json"))
    depth = rng.choice((100, 10_000, 200_000))
    bombs: dict[str, bytes] = {
        "list bomb": b"[" * depth,
        "closed list bomb": b"[" * depth + b"]" * depth,
        "object bomb": b'{"a":' * depth + b"1" + b"}" * depth,
        "nan": b'{"format_version": NaN}',
        "infinity": b'{"format_version": -Infinity}',
        "long number": b'{"format_version": 1' + b"0" * rng.choice((30, 5000)) + b"}",
        "float overflow": b'{"format_version": 1e999}',
        "not utf-8": b'{"name": "\xff\xfe"}',
        "utf-16": '{"format_version": 1}'.encode("utf-16"),
        "bom": b"\xef\xbb\xbf" + scratch.files[MANIFEST],
        "empty": b"",
        "null": b"null",
        "pickle": b"\x80\x04\x95\x1e\x00\x00\x00cos\nsystem\n",
        "yaml": b"!!python/object/apply:os.system ['true']",
    }
    bomb = rng.choice(list(bombs))
    if name == "tokenizer.json" and bomb == "bom":
        raise Neutral
    scratch.replace(name, bombs[bomb], rehash=name != MANIFEST)
    return f"{name}: {bomb}"


def rehashed_golden(scratch: Scratch, rng: random.Random) -> str:
    document = json.loads(scratch.files["golden.json"])
    path = rng.choice(_places(document))
    new = copy.deepcopy(rng.choice((-1, 2**70, "x", None, True, {}, [], 2**40)))
    old = _at(document, path)
    whole = isinstance(new, int) and not isinstance(new, bool)
    if isinstance(old, float) and whole and path[-1] != "tolerance" and (new > 0 or path[-1] != "norm"):
        raise Neutral  # a reference value may be any finite number
    if isinstance(path[-1], int) and path[-2] in ("prompt_ids",) and new is None:
        del _at(document, path[:-1])[path[-1]]
        document["extra"] = 1
    else:
        _at(document, path[:-1])[path[-1]] = new
    scratch.replace("golden.json", json.dumps(document).encode(), rehash=True)
    return f"golden {path} = {new!r}"


def rehashed_onnx(scratch: Scratch, rng: random.Random) -> str:
    """The graph points outside its weights, or is no graph, and the hashes agree."""
    data = scratch.files["decoder.onnx"]
    kinds: dict[str, Callable[[], bytes]] = {
        "location": lambda: data.replace(
            b"decoder.weights", rng.choice((b"/etc/////passwd", b"../decoder.bin!", b"DECODER.WEIGHTS"))
        ),
        "cut": lambda: data[: rng.randrange(1, len(data))],
        "noise": lambda: rng.randbytes(rng.randrange(0, 200)),
        "empty": lambda: b"",
    }
    kind = rng.choice([*kinds, "short weights"])
    if kind == "short weights":
        scratch.replace("decoder.weights", scratch.files["decoder.weights"][: rng.randrange(1000)], rehash=True)
        return "rehashed short weights"
    changed = kinds[kind]()
    if changed == data:
        raise Neutral
    scratch.replace("decoder.onnx", changed, rehash=True)
    return f"rehashed onnx {kind}"


SCHEDULER_EDITS = (
    ("graph_bucket_sizes: ", "[7]"), ("graph_bucket_sizes: ", "[]"), ("graph_bucket_sizes: ", "sixty"),
    ("max_prefill_chunk_size: ", "77"), ("max_prefill_chunk_size: ", "-64"), ("prefill_decode_ratio: ", '"1:0"'),
    ("prefill_decode_ratio: ", '"1:65"'), ("prefill_decode_ratio: ", "6"), ("prefill_decode_ratio: ", "0.17"),
    ("prefill_decode_ratio_range: ", "[8, 4]"), ("prefill_decode_ratio_range: ", "[0, 99]"),
    ("enable_cuda_graph: ", "2"),
    ("graph_batch_sizes: ", "[3]"), ("graph_batch_sizes: ", "[2]"), ("kv_tiers: ", "[99999]"), ("kv_tiers: ", "{}"),
    ("mtp_num_heads: ", "99"), ("mtp_acceptance_threshold: ", "1.5"), ("mtp_acceptance_threshold: ", ".nan"),
    ("slots: ", "99999"), ("slots: ", "0"), ("slots: ", "true"),
    ("context_tokens: ", "99999999"), ("queue_limit: ", "-1"),
    ("warm_up: ", '"true"'), ("memory_margin_fraction: ", ".inf"), ("memory_margin_fraction: ", "0.51"),
    ("memory_headroom_bytes: ", "1" + "0" * 30),
    ("soft_temperature_c: ", "hot"), ("soft_temperature_c: ", ".nan"), ("hard_temperature_c: ", "151"),
    ("power_mode: ", "[]"), ("power_mode: ", '"a b"'),
    ("slots: ", "!!python/object/apply:os.getpid []"), ("slots: ", "&a [*a]"),
)  # fmt: skip


def impossible_schedule(scratch: Scratch, rng: random.Random) -> str:
    lines = scratch.files[SCHEDULER].decode().split("\n")
    key, value = rng.choice(SCHEDULER_EDITS)
    at = next(n for n, line in enumerate(lines) if line.strip().startswith(key))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    kind = rng.choice(("value", "value", "value", "gone", "twice", "misspelt", "unindented"))
    changed = {
        "value": [f"{indent}{key}{value}"],
        "gone": [],
        "twice": [lines[at], lines[at]],
        "misspelt": [lines[at].replace(key, "x" + key)],
        "unindented": [lines[at].lstrip()],
    }[kind]
    text = "\n".join([*lines[:at], *changed, *lines[at + 1 :]])
    (scratch.work / SCHEDULER).write_text(text)
    return f"scheduler {key}{value if kind == 'value' else kind}"


MUTATIONS: tuple[Mutation, ...] = (
    cut_file, cut_manifest, flip_bytes, append_bytes, swap_files, missing_file, extra_file, not_a_file, path_trick,
    wrong_value, wrong_value, contradiction, contradiction, keys, duplicate_key, hostile_json, rehashed_golden,
    rehashed_onnx, impossible_schedule,
)  # fmt: skip
