"""The one place that says which TensorRT is meant: `tensorrt` (classic, Jetson) or `tensorrt_rtx` (TensorRT-RTX).

Both export the same Python API for what this project uses. This module knows nothing of engines, files or devices.
Only the RTX side has been run here; the classic side is type-checked only.
"""

from __future__ import annotations

import importlib
from typing import Any

from edgert.errors import BackendError

# flavour -> (module, how to get it)
MODULES: dict[str, tuple[str, str]] = {
    "tensorrt": ("tensorrt", "it comes with JetPack on a Jetson; elsewhere: pip install tensorrt"),
    "tensorrt-rtx": ("tensorrt_rtx", "pip install tensorrt-rtx-cu13==1.6.1.120"),
}


def _entry(flavour: str) -> tuple[str, str]:
    if flavour not in MODULES:
        raise BackendError(f"backend {flavour!r} is not a TensorRT flavour", hint=f"one of {', '.join(MODULES)}")
    return MODULES[flavour]


def module_name(flavour: str) -> str:
    """The import name of a flavour. Raises BackendError for a flavour that does not exist."""
    return _entry(flavour)[0]


def load(flavour: str) -> Any:
    """The imported module. Raises BackendError, with the install command, when it is missing or broken."""
    name, help_text = _entry(flavour)
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise BackendError(f"backend {flavour} needs the Python module {name}: {error}", hint=help_text) from error


def version(flavour: str) -> str | None:
    """The installed version, or None when the module cannot be imported."""
    try:
        return str(load(flavour).__version__)
    except BackendError:
        return None
