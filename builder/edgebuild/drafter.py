"""Where a drafter's weights come from: the checkpoint's own `mtp.*` tensors, or a sidecar file that training wrote.

A sidecar is a safetensors file with `mtp.*` under the published names, `draft_tokens` (every token id, the most used
first) and a JSON card in its header. Reading the headers imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgebuild.checkpoint import Checkpoint, SourceFile
from edgebuild.checkpoint.safetensors_header import read_header
from edgebuild.errors import CheckpointError
from edgebuild.models.config import ModelConfig
from edgebuild.models.mtp_config import PREFIX, expected_mtp_tensors
from edgebuild.plan import DrafterShape

if TYPE_CHECKING:
    import torch

    from edgebuild.models.flash_mtp import FlashMtp
    from edgebuild.models.mtp import Mtp
    from edgebuild.profile import Profile

DRAFT_TOKENS = "draft_tokens"
_CARD = "card"
_LISTED = 6


@dataclass(frozen=True)
class DrafterWeights:
    """A complete set of MTP tensors. `card`: what training recorded, {} where the tensors are the checkpoint's own.

    source  the checkpoint, or a sidecar's path
    first   tokens to draft before all others: those that a tuning run saw, the most used first
    """

    checkpoint: Checkpoint
    sidecar: Path | None = None
    card: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    first: tuple[int, ...] = ()

    def read(self, name: str) -> torch.Tensor:
        """One tensor, `mtp.*` from the drafter's file, others from the model's."""
        if self.sidecar is None or not name.startswith("mtp."):
            return self.checkpoint.read(name)
        from safetensors import safe_open

        with safe_open(str(self.sidecar), framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """What the artifact depends on beyond the checkpoint's files."""
        return () if self.sidecar is None else (SourceFile.at(self.sidecar),)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Held-out acceptance by position, the mean over tasks; () where the card does not say."""
        return mean_acceptance(self.card)

    def draft_tokens(self, token_limit: int, count: int | None) -> tuple[int, ...]:
        """Ids that may be drafted, ascending: `first`, then the most used of the sidecar's list, `count` in all.

        Without a list, the lowest ids follow `first`; every id may be drafted without a count.
        """
        if count is None or count >= token_limit:
            return tuple(range(token_limit))
        listed = self._listed(count) if not self.first or DRAFT_TOKENS in self.dtypes else range(token_limit)
        order = dict.fromkeys(token for token in (*self.first, *listed) if 0 <= token < token_limit)
        return tuple(sorted(tuple(order)[:count]))

    def _listed(self, count: int) -> list[int]:
        """The sidecar's tokens, the most used first."""
        if self.sidecar is None or DRAFT_TOKENS not in self.dtypes:
            raise CheckpointError(
                f"a draft vocabulary of {count} needs a list of the most used tokens, the drafter has none",
                hint="leave draft.vocabulary out of the profile: every token may be drafted then",
            )
        from safetensors import safe_open

        with safe_open(str(self.sidecar), framework="np") as file:
            return [int(token) for token in file.get_tensor(DRAFT_TOKENS)]


def find_drafter(checkpoint: Checkpoint, config: ModelConfig, sidecar: Path | None) -> DrafterWeights | None:
    """The drafter that was asked for, or None where nothing drafts. Raises CheckpointError for an incomplete one.

    A sidecar goes before the checkpoint's own tensors. Never a random head: each tensor is there in its shape.
    """
    if sidecar is not None:
        dtypes = _checked_sidecar(sidecar, config)
        return DrafterWeights(checkpoint, sidecar, _card(sidecar), dtypes)
    own = {name: checkpoint.shape(name) for name in checkpoint.names() if name.startswith("mtp.")}
    if not own:
        return None
    _match(expected_mtp_tensors(config), own, checkpoint.path.name)
    return DrafterWeights(checkpoint)


def drafter_shape(
    config: ModelConfig, profile: Profile, token_limit: int, acceptance: tuple[float, ...]
) -> DrafterShape:
    """What the plan needs to know of a drafter for this model. token_limit: ids that the tokenizer knows."""
    drafted = min(token_limit, profile.draft.vocabulary or token_limit)
    tables = 1 if config.tie_word_embeddings else 2
    own = sum(math.prod(shape) for shape in expected_mtp_tensors(config).values())
    return DrafterShape(
        own + tables * drafted * config.hidden_size,
        2 * config.kv_heads * config.head_dim + config.index_dim,
        acceptance,
    )


def planned_drafter(profile: Profile, config: ModelConfig) -> DrafterShape | None:
    """The drafter that a build would use, as far as a config and a head's card tell; None where none is asked for."""
    if not profile.draft.length:
        return None
    acceptance: tuple[float, ...] = ()
    if profile.drafter is not None:
        _checked_sidecar(profile.drafter, config)
        acceptance = mean_acceptance(_card(profile.drafter))
    elif not config.mtp_layers:
        raise CheckpointError(
            f"the profile asks for draft length {profile.draft.length}, but the model has no MTP layers",
            hint="give a head with --mtp FILE (edgebuild train-mtp makes one), or set draft.length to 0",
        )
    return drafter_shape(config, profile, config.vocabulary_size, acceptance)


def mean_acceptance(card: Mapping[str, Any]) -> tuple[float, ...]:
    """Held-out acceptance by position, the mean over tasks; () where the card does not say."""
    sets = card.get("acceptance")
    tasks: Mapping[str, Any] = next(iter(sets.values()), {}) if isinstance(sets, dict) else {}
    rates = [entry["acceptance"] for entry in tasks.values() if isinstance(entry, dict) and "acceptance" in entry]
    return tuple(sum(column) / len(column) for column in zip(*rates, strict=False))


def write_sidecar(path: Path, mtp: Mtp, draft_tokens: Sequence[int], card: Mapping[str, Any]) -> int:
    """Write a trained module in float16; returns the bytes of the file."""
    import torch
    from safetensors.torch import save_file

    tensors = {f"mtp.{name}": value.detach().cpu().to(torch.float16) for name, value in mtp.named_parameters()}
    bad = [name for name, value in tensors.items() if not bool(torch.isfinite(value).all())]
    if bad:
        raise CheckpointError(f"{bad[0]} has values that float16 cannot hold", hint="train with a lower learning rate")
    tensors[DRAFT_TOKENS] = torch.tensor(list(draft_tokens), dtype=torch.int32)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path), metadata={"format": "pt", _CARD: json.dumps(card, sort_keys=True)})
    return path.stat().st_size


def load_mtp(drafter: DrafterWeights, config: ModelConfig, dtype: torch.dtype) -> Mtp | FlashMtp:
    """The module with its weights in `dtype`: the reference for tests."""
    import torch

    from edgebuild.models.mtp import make_mtp

    mtp = make_mtp(config, dtype)
    with torch.no_grad():
        for name, parameter in mtp.named_parameters():
            parameter.copy_(drafter.read(PREFIX + name).to(dtype))
    return mtp.eval()


def _checked_sidecar(path: Path, config: ModelConfig) -> dict[str, str]:
    """Tensor name -> dtype of a sidecar that fits the model. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(f"no drafter at {path}", hint="make one: edgebuild train-mtp")
    header = read_header(path)
    shapes = {name: tensor.shape for name, tensor in header.items() if name != DRAFT_TOKENS}
    _match(expected_mtp_tensors(config), shapes, path.name)
    return {name: tensor.dtype for name, tensor in header.items()}


def _card(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(str(path), framework="np") as file:
        text = (file.metadata() or {}).get(_CARD, "{}")
    try:
        card = json.loads(text)
    except ValueError:
        card = None
    if not isinstance(card, dict):
        raise CheckpointError(f"{path.name}: its card is not a JSON object", hint="train it again, or drop the card")
    return card


def _match(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Every tensor there in its shape, and no other."""
    missing = sorted(expected.keys() - found.keys())
    unused = sorted(found.keys() - expected.keys())
    wrong = [
        f"{n} is {list(found[n])}, expected {list(s)}" for n, s in expected.items() if n in found and found[n] != s
    ]
    parts = [
        f"{len(names)} {what}: {', '.join(names[:_LISTED])}"
        for names, what in ((missing, "missing"), (unused, "that nothing uses"), (wrong, "of another shape"))
        if names
    ]
    if parts:
        raise CheckpointError(
            f"{where}: mtp.* tensors do not match the model — {'; '.join(parts)}",
            hint="the drafter must have been trained for this model; nothing was built",
        )
