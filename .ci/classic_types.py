"""Type check of the TensorRT code against NVIDIA's classic library, which this project cannot install or run.

python .ci/classic_types.py STUBS      (STUBS: where `pip install --no-deps --target STUBS tensorrt-stubs` put it)

The code resolves `tensorrt` or `tensorrt_rtx` at run time, so to mypy the module is Any. Here copies of the files are
checked with `trt` bound to the stubs' classic module. The stubs must not be installed in an environment that runs
the code: they make `import tensorrt` succeed with an empty package. Names that only TensorRT-RTX has are listed; the
code uses them behind a test of the flavour or of the attribute.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = (
    "runtime/edgert/backends/trt_engine.py",
    "runtime/edgert/backends/tensorrt.py",
    "runtime/edgert/backends/trt_drafter.py",
    "runtime/edgert/backends/trt_states.py",
    "builder/edgebuild/engine/tensorrt.py",
)
RTX_ONLY = frozenset(
    {
        "ComputeCapability",
        "DynamicShapesKernelSpecializationStrategy",
        "create_runtime_cache",
        "dynamic_shapes_kernel_specialization_strategy",
        "set_runtime_cache",
    }
)
# true of the library, and not said by the stubs
UNSAID = ('"Dims" has no attribute "__iter__"',)  # it iterates through __getitem__
# the module and its objects by their classic types, where the code says Any
BINDINGS = (
    (r"^(\s*)trt = (?:trt_module\.load\(.*\)|self\.trt)$", r"\1pass"),
    (r"\btrt: Any\b", "_trt: Any"),
    (r"\bbuilder: Any\b", "builder: trt.Builder"),
    (r"\bnetwork: Any\b", "network: trt.INetworkDefinition"),
    (r"\bconfig: Any\b", "config: trt.IBuilderConfig"),
    (r"(_deserialize\(self, plan: Path\)) -> Any", r"\1 -> trt.ICudaEngine"),
    (r"\bself\._config: Any = None", "self._config: trt.IRuntimeConfig | None = None"),
    (r"\bcontext: Any = None", "context: trt.IExecutionContext | None = None"),
    (r"\bcontext: Any,", "context: trt.IExecutionContext,"),
)
# what keeps mypy from reading the stubs: a keyword as a parameter, reprs as defaults, a default before none, a shadow
REPAIRS = (
    (r"\bin: ", "in_: "),
    (r"<[\w.]+: -?\d+>", "..."),
    (r"= None, channel_axis: int", "= None, channel_axis: int = 0"),
    (r"\A", "import builtins as _builtins\n"),
)
KINDS = ("attr-defined", "union-attr", "call-arg", "arg-type", "call-overload", "operator", "index")


def main(stubs: Path) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        types, sources = Path(scratch, "types"), Path(scratch, "sources")
        shutil.copytree(stubs, types)
        _rewrite(types / "tensorrt_bindings" / "tensorrt.pyi", REPAIRS)
        sources.mkdir()
        for name in FILES:
            copy = sources / ("classic_" + name.replace("/", "_"))
            shutil.copy(ROOT / name, copy)
            _rewrite(copy, (*BINDINGS, (r"^from __future__.*$", r"\g<0>\nimport tensorrt as trt")))
        complaints = _mypy(sources, types)
    print(f"{len(FILES)} files against tensorrt-stubs: {len(complaints)} complaints")
    print("\n".join(complaints))
    return 1 if complaints else 0


def _rewrite(path: Path, changes: tuple[tuple[str, str], ...]) -> None:
    text = path.read_text()
    for pattern, replacement in changes:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    path.write_text(text)


def _mypy(sources: Path, types: Path) -> list[str]:
    """What mypy says of the copies and is not about a name that only TensorRT-RTX has. Raises where it cannot run."""
    command = [sys.executable, "-m", "mypy", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    command += ["--check-untyped-defs", "--no-strict-optional", f"--cache-dir={sources / 'cache'}"]
    paths = [types, ROOT / "runtime", ROOT / "builder"]
    result = subprocess.run(
        [*command, *map(str, sorted(sources.glob("*.py")))],
        env={"PATH": "/usr/bin:/bin", "MYPYPATH": ":".join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode not in (0, 1) or "[syntax]" in result.stdout:
        raise SystemExit(f"mypy could not run: {result.stderr or result.stdout}")
    found = [line for line in result.stdout.splitlines() if f"{sources.name}/classic_" in line]
    found = [line for line in found if any(line.endswith(f"[{kind}]") for kind in KINDS)]
    known = (*(f'"{name}"' for name in RTX_ONLY), *UNSAID)
    return [line for line in found if not any(text in line for text in known)]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
