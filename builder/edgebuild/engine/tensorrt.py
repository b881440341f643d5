"""Builds a TensorRT engine ahead of time from an ONNX file, the decoder's or the drafter's, through Polygraphy.

Strongly typed (precision is the ONNX file's), one optimization profile per cell with min = opt = max, scratch memory
left to the runtime (`REQUIRE_USER_ALLOCATION`: without it stream capture is not promised). With TensorRT-RTX this needs
no GPU. The file is parsed by path, so weights stay in external data and may pass 2 GB. This module knows nothing of the
model: input shapes come from `shapes.py`, targets from `targets.py`. It does not load the engine: that takes a GPU.
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from edgert.backends import trt_module
from edgert.backends.trt_plan import pack_plan
from edgert.cells import Cell

from edgebuild.engine.shapes import (
    DECODER_NEEDS,
    DRAFTER_NEEDS,
    MIN_MATRIX_ROWS,
    EngineShape,
    draft_shapes,
    engine_shape,
    input_shapes,
)
from edgebuild.engine.targets import target_names
from edgebuild.errors import EngineError

# called with (phase name, steps done, steps in all); returning False stops the build
Progress = Callable[[str, int, int], bool]
ALIASED_OUTPUT_SUFFIX = ".out"


@dataclass(frozen=True)
class EngineTensor:
    """One input or output of the network; −1 stands for a dynamic dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class EngineBuild:
    """What was built, read back from the network and the file.

    plan_bytes      size of the plan file
    unpacked_bytes  of what TensorRT made; more than the file where that is packed
    weight_bytes    constants in the network, each counted once
    shapes          one per profile; the decoder's: one per cell, in the order of the cells
    aliased         (output, input) pairs that must share memory: caches updated in place
    capabilities    compute capability names the plan was built for; empty = the library's default set
    """

    path: Path
    flavour: str
    version: str
    plan_bytes: int
    unpacked_bytes: int
    weight_bytes: int
    cells: tuple[Cell, ...]
    shapes: tuple[EngineShape, ...]
    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    aliased: tuple[tuple[str, str], ...]
    capabilities: tuple[str, ...]
    layers: int
    seconds: float


def build_engine(
    onnx_path: Path,
    plan_path: Path,
    cells: Sequence[Cell],
    *,
    flavour: str = "tensorrt-rtx",
    compute_capabilities: Sequence[str] = (),
    min_matrix_rows: int = MIN_MATRIX_ROWS,
    packed: bool = False,
    progress: Progress | None = None,
) -> EngineBuild:
    """Parses `onnx_path`, builds one profile per cell and writes the plan to `plan_path` (which must not exist).

    packed: as `edgert.backends.trt_plan` describes.
    `compute_capabilities` such as ("8.9",) are targets for TensorRT-RTX; empty takes the library's default set. Classic
    TensorRT always builds for the GPU it runs on. Raises EngineError (what failed, with the library's own words) and
    BackendError when the library is missing.
    """
    shapes = tuple(engine_shape(cell, min_matrix_rows=min_matrix_rows) for cell in cells)
    return _engine(onnx_path, plan_path, cells, shapes, DECODER_NEEDS, flavour, compute_capabilities, packed, progress)


def build_drafter_engine(
    onnx_path: Path,
    plan_path: Path,
    cells: Sequence[Cell],
    *,
    draft_length: int,
    cache_tokens: int,
    flavour: str = "tensorrt-rtx",
    compute_capabilities: Sequence[str] = (),
    min_matrix_rows: int = MIN_MATRIX_ROWS,
    packed: bool = False,
    progress: Progress | None = None,
) -> EngineBuild:
    """As `build_engine`, for `mtp.onnx`: the passes that follow steps of `cells` (shapes.draft_shapes)."""
    shapes = draft_shapes(cells, draft_length=draft_length, cache_tokens=cache_tokens, min_matrix_rows=min_matrix_rows)
    return _engine(onnx_path, plan_path, cells, shapes, DRAFTER_NEEDS, flavour, compute_capabilities, packed, progress)


def _engine(
    onnx_path: Path,
    plan_path: Path,
    cells: Sequence[Cell],
    shapes: tuple[EngineShape, ...],
    needs: Sequence[str],
    flavour: str,
    compute_capabilities: Sequence[str],
    packed: bool,
    progress: Progress | None,
) -> EngineBuild:
    if not shapes:
        raise EngineError("no cells: an engine needs at least one optimization profile")
    if not onnx_path.is_file():
        raise EngineError(f"{onnx_path}: no such ONNX file")
    trt = trt_module.load(flavour)
    started = time.monotonic()
    with Interrupt() as interrupt, _polygraphy(trt, flavour) as messages:
        builder, network, parser = _parse(trt, onnx_path.resolve(), messages)
        inputs = tuple(_tensor(network.get_input(i)) for i in range(network.num_inputs))
        outputs = tuple(_tensor(network.get_output(i)) for i in range(network.num_outputs))
        declared = {tensor.name: tensor.shape for tensor in inputs}
        targets = _targets(trt, flavour, compute_capabilities)
        profiles = [input_shapes(shape, declared, needs) for shape in shapes]
        serialized = _build(trt, flavour, builder, network, profiles, targets, progress, interrupt, messages)
        _write(plan_path, serialized, packed)
        build = EngineBuild(
            path=plan_path,
            flavour=flavour,
            version=str(trt.__version__),
            plan_bytes=plan_path.stat().st_size,
            unpacked_bytes=int(serialized.nbytes),
            weight_bytes=_constant_bytes(trt, network),
            cells=tuple(cells),
            shapes=shapes,
            inputs=inputs,
            outputs=outputs,
            aliased=_aliased(inputs, outputs),
            capabilities=targets,
            layers=int(network.num_layers),
            seconds=time.monotonic() - started,
        )
        del serialized, parser, network, builder  # in this order: each needs the one after it
    return build


def _write(path: Path, content: Any, packed: bool) -> None:
    try:
        if packed:
            pack_plan(content, path)
        else:
            with path.open("xb") as file:
                file.write(content)
    except FileExistsError:
        raise EngineError(f"{path} exists already", hint="remove it or choose another output") from None
    except OSError as error:
        path.unlink(missing_ok=True)
        raise EngineError(f"{path} could not be written: {error.strerror}") from error


def _parse(trt: Any, path: Path, messages: list[str]) -> tuple[Any, Any, Any]:
    from polygraphy.backend.trt import NetworkFromOnnxPath
    from polygraphy.exception import PolygraphyException

    strongly_typed = hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")
    try:
        parsed: tuple[Any, Any, Any] = NetworkFromOnnxPath(str(path), strongly_typed=strongly_typed)()
    except PolygraphyException as error:
        raise EngineError(f"{path.name}: {_parser_complaint(trt, path) or _last(messages, error)}") from error
    return parsed


def _parser_complaint(trt: Any, path: Path) -> str | None:
    """Parses again without Polygraphy, whose exception drops the parser's structured errors: operator and node."""
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    parser.parse_from_file(str(path))
    if not parser.num_errors:
        return None
    error = parser.get_error(0)
    operator, node, what = error.node_operator(), error.node_name(), str(error.desc()).strip()
    if not operator:
        return what
    return f"TensorRT cannot take operator {operator} of node {node!r}: {what}"


def _targets(trt: Any, flavour: str, capabilities: Sequence[str]) -> tuple[str, ...]:
    if flavour != "tensorrt-rtx" or not capabilities:
        return ()
    known = [name for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    return target_names(capabilities, known)


def _build(
    trt: Any,
    flavour: str,
    builder: Any,
    network: Any,
    profiles: Sequence[dict[str, tuple[int, ...]]],
    targets: Sequence[str],
    progress: Progress | None,
    interrupt: Interrupt,
    messages: list[str],
) -> Any:
    from polygraphy.backend.trt import CreateConfig, EngineBytesFromNetwork, PostprocessConfig, Profile
    from polygraphy.exception import PolygraphyException

    wanted = []
    for shapes in profiles:
        profile = Profile()
        for name, shape in shapes.items():
            profile.add(name, min=shape, opt=shape, max=shape)
        wanted.append(profile)
    monitor = _monitor(trt, progress or (lambda *_: True), interrupt)
    if flavour == "tensorrt-rtx":
        from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

        pairs = [(int(name[2:-1]), int(name[-1])) for name in targets] or None
        config = CreateConfigRTX(profiles=wanted, compute_capabilities=pairs, progress_monitor=monitor)
    else:
        config = CreateConfig(profiles=wanted, progress_monitor=monitor)

    def leave_scratch_to_the_runtime(builder: Any, network: Any, config: Any) -> None:  # noqa: ARG001
        if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)

    config = PostprocessConfig(config, func=leave_scratch_to_the_runtime)
    try:
        return EngineBytesFromNetwork((builder, network), config=config)()
    except PolygraphyException as error:
        if monitor.stopped:
            raise EngineError("engine build stopped on request") from error
        raise EngineError(f"the engine could not be built: {_last(messages, error)}") from error


class Interrupt:
    """Ctrl-C as a flag while inside, raised on the way out: raised in a callback from C++ it would be swallowed."""

    def __init__(self) -> None:
        self.caught = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # elsewhere no handler can be set, nor does one run
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self.caught:
            raise KeyboardInterrupt

    def _handle(self, _number: int, _frame: Any) -> None:
        self.caught = True


def _monitor(trt: Any, progress: Progress, interrupt: Interrupt) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # the base class is only known at run time
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.total: dict[str, int] = {}
            self.stopped = False

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002
            self.total[phase_name] = num_steps
            self.step_complete(phase_name, -1)

        def phase_finish(self, phase_name: str) -> None:
            self.step_complete(phase_name, self.total.get(phase_name, 1) - 1)

        def step_complete(self, phase_name: str, step: int) -> bool:
            # called from C++ threads, through a frame that must not throw
            go_on = progress(phase_name, step + 1, self.total.get(phase_name, 1))
            self.stopped = self.stopped or not go_on or interrupt.caught
            return not self.stopped

    return Monitor()


def _tensor(tensor: Any) -> EngineTensor:
    return EngineTensor(
        name=str(tensor.name), dtype=tensor.dtype.name.lower(), shape=tuple(int(dim) for dim in tensor.shape)
    )


def _constant_bytes(trt: Any, network: Any) -> int:
    total = 0
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.CONSTANT:
            tensor = layer.get_output(0)
            count = 1
            for dim in tensor.shape:
                count *= int(dim)
            total += count * max(1, int(tensor.dtype.itemsize))
    return total


def _aliased(inputs: Sequence[EngineTensor], outputs: Sequence[EngineTensor]) -> tuple[tuple[str, str], ...]:
    """State pairs by name: output `key.0.out` updates input `key.0` in place."""
    names = {tensor.name for tensor in inputs}
    stems = [(o.name, o.name.removesuffix(ALIASED_OUTPUT_SUFFIX)) for o in outputs if o.name not in names]
    return tuple((name, stem) for name, stem in stems if stem in names)


def _last(messages: Sequence[str], error: Exception) -> str:
    """The library's own last complaint, or the exception's first line."""
    text = messages[-1] if messages else str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


@contextmanager
def _polygraphy(trt: Any, flavour: str) -> Iterator[list[str]]:
    """Points Polygraphy at the flavour (once per process: it binds on import) and collects TensorRT errors."""
    import polygraphy.config

    wants_rtx = flavour == "tensorrt-rtx"
    polygraphy.config.USE_TENSORRT_RTX = wants_rtx
    import polygraphy.logger.logger as polygraphy_logger

    polygraphy_logger.COLORED_MODULE_PRESENT = False  # else it prints advice to stdout
    from polygraphy.backend.trt import util as trt_util

    bound = str(trt_util.trt.__name__)
    if bound != trt.__name__:
        raise EngineError(
            f"Polygraphy is already bound to {bound} in this process, {trt.__name__} is needed",
            hint="build one TensorRT flavour per process",
        )
    messages: list[str] = []

    class Collector(trt.ILogger):  # type: ignore[misc]  # the base class is only known at run time
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.Logger.INTERNAL_ERROR, trt.Logger.ERROR):
                messages.append(msg)

    before = trt_util.TRT_LOGGER
    trt_util.TRT_LOGGER = Collector()
    try:
        with (
            polygraphy_logger.G_LOGGER.verbosity(polygraphy_logger.G_LOGGER.CRITICAL + 1),
            warnings.catch_warnings(),
        ):
            # Polygraphy 0.53 sets a timing cache, which TensorRT-RTX 1.6 calls deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            yield messages
    finally:
        trt_util.TRT_LOGGER = before
