"""edgert runs an artifact that edgebuild made, and nothing else.

`from edgert import Engine`. Importing the package is quick: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False  # type checkers take it for true; the typing module alone would be most of a cold import
if TYPE_CHECKING:
    from typing import Any

    from edgert.aio import AsyncEngine
    from edgert.engine import Engine
    from edgert.errors import EdgertError
    from edgert.handles import Completion, Delta, Handle
    from edgert.sampling import SamplingParams

_EXPORTS = {
    "AsyncEngine": "edgert.aio",
    "Completion": "edgert.handles",
    "Delta": "edgert.handles",
    "EdgertError": "edgert.errors",
    "Engine": "edgert.engine",
    "Handle": "edgert.handles",
    "SamplingParams": "edgert.sampling",
}

__all__ = [
    "AsyncEngine",
    "Completion",
    "Delta",
    "EdgertError",
    "Engine",
    "Handle",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'edgert' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
