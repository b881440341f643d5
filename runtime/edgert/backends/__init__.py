"""The inference backends. Each is one module, imported only when an artifact asks for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from edgert.backends.base import Backend, Setup
from edgert.errors import BackendError

# manifest's backend name → module that has `open_backend(setup)`
MODULES = {
    "onnxruntime": "edgert.backends.onnxruntime",
    "tensorrt": "edgert.backends.tensorrt",
    "tensorrt-rtx": "edgert.backends.tensorrt",
}


def resolve(name: str) -> Callable[[Setup], Backend]:
    """`open_backend` of the named backend. Raises BackendError for an unknown name or a library that is missing."""
    if name not in MODULES:
        raise BackendError(f"unknown backend {name!r}", hint=f"known: {', '.join(MODULES)}")
    try:
        module = importlib.import_module(MODULES[name])
    except ImportError as error:
        hint = "install its extra"
        if name == "onnxruntime":
            hint = "install ONNX Runtime 1.25 or newer; it needs Python 3.11"
        raise BackendError(f"backend {name} cannot be imported: {error}", hint=hint) from error
    open_backend: Callable[[Setup], Backend] = module.open_backend
    return open_backend
