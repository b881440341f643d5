"""The manifest's numbers against each other: cells against slots, tiers against the cache, states against tensors.

Pure: a Manifest in, nothing or an ArtifactError out.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgert.errors import ArtifactError
from edgert.manifest_records import (
    DRAFTING_INPUTS,
    DRAFTING_OUTPUTS,
    MANIFEST_NAME,
    MAX_BYTES,
    STEP_INPUTS,
    STEP_OUTPUTS,
    Manifest,
    TensorSpec,
    drafter_file,
)
from edgert.strictjson import REBUILD


def _fail(where: str, message: str, *, hint: str = REBUILD) -> ArtifactError:
    return ArtifactError(f"{MANIFEST_NAME}: {where}: {message}", hint=hint)


def check_consistency(manifest: Manifest) -> None:
    """Raise ArtifactError for the first rule that does not hold."""
    _check_cells(manifest)
    _check_tensors(manifest)
    _check_states(manifest)
    _check_drafter(manifest)
    _check_files(manifest)
    if manifest.backend.name != "onnxruntime" and manifest.state == "complete":
        for field, value in (
            ("version", manifest.backend.version),
            ("compute_capabilities", manifest.backend.compute_capabilities),
        ):
            if not value:
                raise _fail(f"backend.{field}", f"is empty, but a {manifest.backend.name} plan is bound to one")


def _check_cells(manifest: Manifest) -> None:
    if manifest.cache_tokens < manifest.context_tokens:
        raise _fail("cache_tokens", f"{manifest.cache_tokens} is below context_tokens {manifest.context_tokens}")
    if len(set(manifest.cells)) != len(manifest.cells):
        raise _fail("cells", "one cell stands twice")
    for index, cell in enumerate(manifest.cells):
        if cell.batch > manifest.slots:
            raise _fail(f"cells[{index}].batch", f"{cell.batch} is more than the {manifest.slots} slots")
        if cell.kv_tier > manifest.cache_tokens:
            raise _fail(f"cells[{index}].kv_tier", f"{cell.kv_tier} is past cache_tokens {manifest.cache_tokens}")
        if cell.kind == "decode" and cell.query_rows > 65:
            raise _fail(f"cells[{index}].query_rows", f"{cell.query_rows} decode rows, at most 1 + 64 drafts")
    for kind, cells in (("prefill", manifest.prefill_cells), ("decode", manifest.decode_cells)):
        single = [cell for cell in cells if cell.batch == 1]
        if not single:
            raise _fail("cells", f"no {kind} cell of batch 1")
        reach = max(cell.kv_tier for cell in single)
        if reach < manifest.context_tokens:
            raise _fail("cells", f"{kind} tiers end at {reach}, context_tokens is {manifest.context_tokens}")
    chunk = max(cell.query_rows for cell in manifest.cells)
    if manifest.cache_tokens < manifest.context_tokens + chunk:
        raise _fail(
            "cache_tokens",
            f"{manifest.cache_tokens} is below context_tokens {manifest.context_tokens} + largest chunk {chunk}",
        )


def _by_name(tensors: Sequence[TensorSpec], where: str) -> dict[str, TensorSpec]:
    found: dict[str, TensorSpec] = {}
    for index, tensor in enumerate(tensors):
        if tensor.name in found:
            raise _fail(f"{where}[{index}].name", f"{tensor.name!r} stands twice")
        found[tensor.name] = tensor
    return found


def _check_tensors(manifest: Manifest) -> None:
    expected = {
        "tokens": ("int64", ("batch", "rows")),
        "length": ("int64", ("batch",)),
        "valid": ("int64", ("batch",)),
        "forced": ("int64", ("batch",)),
        "kv_positions": ("int64", ("tier",)),
        "uniform": ("float32", ("batch", "logit_rows")),
        "temperature": ("float32", ("batch",)),
        "top_k": ("int64", ("batch",)),
        "top_p": ("float32", ("batch",)),
        "sampled": ("int64", ("batch", "logit_rows")),
        "accepted": ("int64", ("batch",)),
        "next_token": ("int64", ("batch",)),
        "new_length": ("int64", ("batch",)),
        "logits": ("float32", ("batch", "logit_rows", manifest.model.token_limit)),
    }
    drafts = manifest.draft_length > 0
    expected |= {"following": ("int64", ("batch",))}
    for name, width in zip(DRAFTING_OUTPUTS, (_hidden_width(manifest), manifest.model.hidden_size), strict=True):
        expected[name] = (manifest.backend.precision, ("batch", "rows", width))
    for where, tensors, names in (
        ("tensors.inputs", manifest.inputs, STEP_INPUTS + (DRAFTING_INPUTS if drafts else ())),
        ("tensors.outputs", manifest.outputs, STEP_OUTPUTS + (DRAFTING_OUTPUTS if drafts else ())),
    ):
        found = _by_name(tensors, where)
        for name in names:
            if name not in found:
                raise _fail(where, f"{name!r} is missing")
            tensor = found[name]
            if (tensor.dtype, tensor.shape) != expected[name]:
                raise _fail(where, f"{name!r} is {tensor.dtype}{list(tensor.shape)}, expected "
                            f"{expected[name][0]}{list(expected[name][1])}")  # fmt: skip


def _hidden_width(manifest: Manifest) -> int | str:
    """Of the rows for the drafter: whole residual streams, one in most models."""
    for tensor in manifest.outputs:
        if tensor.name == DRAFTING_OUTPUTS[0] and len(tensor.shape) == 3:
            width, one = tensor.shape[2], manifest.model.hidden_size
            return width if isinstance(width, int) and width > 0 and width % one == 0 else one
    return manifest.model.hidden_size


def _check_states(manifest: Manifest) -> None:
    inputs = {tensor.name: tensor for tensor in manifest.inputs}
    outputs = {tensor.name: tensor for tensor in manifest.outputs}
    seen: set[str] = set(STEP_INPUTS) | set(STEP_OUTPUTS)
    if manifest.draft_length:
        seen |= {*DRAFTING_INPUTS, *DRAFTING_OUTPUTS}
    total = 0
    for index, state in enumerate(manifest.states):
        where = f"states[{index}]"
        if state.kind == "kv" and (len(state.shape) != 3 or state.shape[1] != manifest.cache_tokens):
            raise _fail(
                f"{where}.shape",
                f"{list(state.shape)} is not [kv_heads, cache_tokens, head_dim] of {manifest.cache_tokens} positions",
            )
        for field, name, tensors in (("input", state.input, inputs), ("output", state.output, outputs)):
            if name in seen:
                raise _fail(f"{where}.{field}", f"{name!r} is used twice")
            seen.add(name)
            tensor = tensors.get(name)
            if tensor is None:
                raise _fail(f"{where}.{field}", f"{name!r} is not among tensors.{field}s")
            if (tensor.dtype, tensor.shape) != (state.dtype, ("batch", *state.shape)):
                raise _fail(where, f"{name!r} is {tensor.dtype}{list(tensor.shape)} among the tensors, "
                            f"{state.dtype}{['batch', *state.shape]} among the states")  # fmt: skip
        total += manifest.slots * state.slot_bytes
        if total > MAX_BYTES:
            raise _fail(where, f"the states of {manifest.slots} slots need {total} bytes")
    for name in inputs:
        if name not in seen:
            raise _fail("tensors.inputs", f"{name!r} is neither a step input nor a state")


def _check_drafter(manifest: Manifest) -> None:
    """A drafter has a vocabulary and states of its own; an artifact without one has neither."""
    length, vocabulary, states = manifest.draft_length, manifest.draft_vocabulary, manifest.draft_states
    if not length:
        if vocabulary or states:
            raise _fail("draft", f"length 0, but {vocabulary} tokens and {len(states)} states of a drafter")
        return
    if not 1 <= vocabulary <= manifest.model.token_limit:
        raise _fail("draft.vocabulary", f"{vocabulary} tokens, expected 1 to {manifest.model.token_limit}")
    room = manifest.cache_tokens - manifest.context_tokens
    if length > room:
        raise _fail("draft.length", f"{length} drafts, {room} cache positions lie past the context")
    names: set[str] = {state.input for state in manifest.states}
    for index, state in enumerate(states):
        where = f"draft.states[{index}]"
        if state.kind != "kv" or len(state.shape) != 3 or state.shape[1] != manifest.cache_tokens:
            raise _fail(where, f"{state.kind} {list(state.shape)} is no cache of {manifest.cache_tokens} positions")
        if state.input in names:
            raise _fail(where, f"{state.input!r} is used twice")
        names.add(state.input)
    if not states:
        raise _fail("draft.states", "a drafter without a cache")
    if manifest.backend.precision != states[0].dtype:
        raise _fail("draft.states[0]", f"{states[0].dtype}, the artifact's precision is {manifest.backend.precision}")


def _check_files(manifest: Manifest) -> None:
    names: dict[str, str] = {}
    for index, entry in enumerate(manifest.files):
        folded = entry.path.casefold()
        if folded == MANIFEST_NAME:
            raise _fail(f"files[{index}].path", f"{MANIFEST_NAME} cannot list itself")
        if folded in names:
            raise _fail(f"files[{index}].path", f"{entry.path!r} and {names[folded]!r} are the same on some disks")
        names[folded] = entry.path
    for folded, path in names.items():
        parents = folded.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            if "/".join(parents[:depth]) in names:
                raise _fail("files", f"{path!r} lies below a path that is a file")
    needed = [manifest.decoder_file]
    if manifest.draft_length:
        needed.append(drafter_file(manifest.backend.name, manifest.state))
    if manifest.state == "complete":
        needed += ["scheduler.yaml", "golden.json"]
    for path in needed:
        if manifest.file(path) is None:
            raise _fail("files", f"{path} is not listed")
