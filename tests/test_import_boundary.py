"""edgert stands alone: what an import pulls in, seen from a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

FORBIDDEN = {"torch", "onnx", "onnxscript", "onnx_ir", "polygraphy", "pydantic", "edgebuild", "transformers", "click"}
# The runtime's dependencies, and what these import themselves.
ALLOWED = {
    "numpy",
    "yaml",
    "_yaml",
    "tokenizers",
    "jinja2",
    "markupsafe",
    "onnxruntime",
    "edgert",
    # by onnxruntime: flatbuffers and protobuf; coloredlogs where it is installed
    "google",
    "flatbuffers",
    "packaging",
    "coloredlogs",
    "humanfriendly",
    "sympy",
    "mpmath",
    # by tokenizers: its hub client is imported for from_pretrained only, its types are not ours to choose
    "huggingface_hub",
    "typing_extensions",
}
PROBE = """
import importlib, json, sys
before = set(sys.modules)
for name in {names!r}:
    importlib.import_module(name)
{then}
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""


def imported_by(*names: str, then: str = "") -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after importing `names`, without the standard library."""
    code = PROBE.format(names=names, then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = set(json.loads(done.stdout.splitlines()[-1])) - set(sys.stdlib_module_names)
    return {name for name in found if "cython" not in name}  # the support modules of a compiled extension (PyYAML's)


def test_the_package_alone_imports_nothing() -> None:
    assert imported_by("edgert") == {"edgert"}


@pytest.mark.parametrize(
    "names",
    [
        ("edgert.engine", "edgert.aio", "edgert.loading", "edgert.text"),
        ("edgert.backends.onnxruntime",),
        ("edgert.doctor", "edgert.guards.detect", "edgert.prometheus"),
        ("edgert.engine", "edgert.backends.onnxruntime", "edgert.golden", "edgert.manifest", "edgert.config"),
    ],
)
def test_the_runtime_imports_its_own_dependencies_and_nothing_that_builds(names: tuple[str, ...]) -> None:
    found = imported_by(*names)
    assert not found & FORBIDDEN
    assert found <= ALLOWED, f"not on the list: {sorted(found - ALLOWED)}"


def test_the_engine_does_not_load_a_backend_before_an_artifact_asks_for_it() -> None:
    assert "onnxruntime" not in imported_by("edgert.engine", "edgert.aio", then="from edgert import Engine")


def test_every_public_name_can_be_reached() -> None:
    import edgert

    for name in edgert.__all__:
        assert getattr(edgert, name) is not None
    with pytest.raises(AttributeError, match="Engin"):
        edgert.Engin  # noqa: B018
    assert dir(edgert) == sorted(edgert.__all__)
