"""Model families as torch modules: the numeric reference, what is exported, and later what trains the drafter.

`load_decoder` is imported lazily, so that reading a config needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgebuild.models.loading import load_decoder

__all__ = ["load_decoder"]


def __getattr__(name: str) -> Any:
    if name == "load_decoder":
        from edgebuild.models.loading import load_decoder

        return load_decoder
    raise AttributeError(name)
