"""A plan file turned into execution contexts: checks before TensorRT sees it, loading, the JIT cache.

Knows the TensorRT API and nothing of steps, slots or graphs. Works for both flavours; what only TensorRT-RTX has
(runtime cache, user-managed contexts through a runtime configuration) is used where it exists.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgert.backends import trt_module
from edgert.backends.trt_plan import PackedPlan, is_packed, stream_reader
from edgert.cells import Cell
from edgert.cuda import DeviceInfo, Stream
from edgert.errors import ArtifactError, BackendError
from edgert.manifest_records import StateSpec

logger = logging.getLogger(__name__)
PLAN_NAME = "decoder.plan"


@dataclass(frozen=True)
class BuiltFor:
    """What the manifest says of the plan: flavour, version, compute capabilities ("8.7"; none = any)."""

    flavour: str
    version: str | None
    compute_capabilities: tuple[str, ...] = ()


def check_compatible(built: BuiltFor, installed: str, device: DeviceInfo) -> None:
    """Refuses a plan that this TensorRT or this device cannot run, with both values. Raises ArtifactError."""
    if built.version is not None and built.version.split("+")[0] != installed.split("+")[0]:
        raise ArtifactError(
            f"the engine was built by {built.flavour} {built.version}, installed is {installed}",
            hint="install that version, or rebuild the artifact",
        )
    if built.compute_capabilities and device.compute_capability not in built.compute_capabilities:
        raise ArtifactError(
            f"the engine was built for compute capability {', '.join(built.compute_capabilities)}, "
            f"{device.name} has {device.compute_capability}",
            hint="rebuild with this device's profile",
        )


class Log:
    """TensorRT's log: errors are kept for the exception that follows, warnings go to `logging` at debug level."""

    def __init__(self, trt: Any) -> None:
        self.errors: list[str] = []
        keep = self.errors

        class Logger(trt.ILogger):  # type: ignore[misc]  # the base class is only known at run time
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, msg: str) -> None:
                if severity in (trt.Logger.INTERNAL_ERROR, trt.Logger.ERROR):
                    keep.append(msg)
                    del keep[:-20]
                else:
                    logger.debug("%s", msg)

        self.raw = Logger()

    def last(self) -> str:
        return self.errors[-1].strip().splitlines()[0] if self.errors else "no reason given"


@dataclass(frozen=True)
class CellShape:
    """A profile as the engine was built: rows and logit rows per sequence, KV tier."""

    batch: int
    rows: int
    logit_rows: int
    tier: int


class Engine:
    """A deserialised plan. `names` are all tensors, `scratch_bytes` the largest need of any profile."""

    def __init__(self, flavour: str, plan: Path, cache: bytes | None, options: Mapping[str, Any]) -> None:
        trt = trt_module.load(flavour)
        self.trt, self.flavour, self.log = trt, flavour, Log(trt)
        self.version = str(trt.__version__)
        self._runtime = trt.Runtime(self.log.raw)
        self._engine = self._deserialize(plan)
        engine = self._engine
        self.names = tuple(engine.get_tensor_name(i) for i in range(engine.num_io_tensors))
        self.profiles = int(engine.num_optimization_profiles)
        self.scratch_bytes = int(engine.device_memory_size_v2)
        self.scratch_by_profile = tuple(
            int(engine.get_device_memory_size_for_profile_v2(i)) for i in range(self.profiles)
        )
        self._config: Any = None
        self._cache: Any = None
        if hasattr(engine, "create_runtime_config"):
            self._config = engine.create_runtime_config()
            self._config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
            if hasattr(self._config, "create_runtime_cache"):
                self._use_cache(cache)
                # every profile has one shape: compile its kernels at once, not a generic version first
                strategy = str(options.get("kernel_specialization", "EAGER"))
                strategies = trt.DynamicShapesKernelSpecializationStrategy
                self._config.dynamic_shapes_kernel_specialization_strategy = getattr(strategies, strategy)

    def _deserialize(self, plan: Path) -> Any:
        try:
            engine = self._from_packed(plan) if is_packed(plan) else self._from_map(plan)
        except OSError as error:
            raise ArtifactError(f"{plan}: {error.strerror}") from error
        if engine is None:
            raise BackendError(f"TensorRT cannot load {plan.name}: {self.log.last()}", hint="rebuild the artifact")
        return engine

    def _from_map(self, plan: Path) -> Any:
        with (
            plan.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            return self._runtime.deserialize_cuda_engine(view)

    def _from_packed(self, plan: Path) -> Any:
        errors: list[Exception] = []
        with closing(PackedPlan(plan)) as packed:
            engine = self._runtime.deserialize_cuda_engine(stream_reader(self.trt, packed, errors))
        if errors:
            raise errors[0]
        return engine

    def _use_cache(self, content: bytes | None) -> None:
        self._cache = self._config.create_runtime_cache()
        if content:
            try:
                self._cache.deserialize(content)
            except Exception as error:  # pybind raises several kinds; each means that the cache is of no use
                logger.warning("the JIT cache could not be read (%s): kernels are compiled anew", error)
                self._cache = self._config.create_runtime_cache()
        self._config.set_runtime_cache(self._cache)

    def cache_content(self) -> bytes | None:
        """What was compiled so far, or None where this flavour has no such cache."""
        if self._cache is None:
            return None
        return bytes(self._cache.serialize())

    def shape(self, profile: int) -> CellShape:
        """Read back from the engine: min = opt = max."""

        def dims(name: str) -> tuple[int, ...]:
            return tuple(int(d) for d in self._engine.get_tensor_profile_shape(name, profile)[2])

        batch, rows = dims("tokens")
        logit_rows = dims("uniform")[1] if "uniform" in self.names else rows
        return CellShape(batch, rows, logit_rows, dims("kv_positions")[0])

    def draft_shape(self, profile: int) -> CellShape:
        """The same of a drafter's plan."""
        batch, rows, _ = (int(d) for d in self._engine.get_tensor_profile_shape("hidden", profile)[2])
        return CellShape(batch, rows, 1, int(self._engine.get_tensor_profile_shape("kv_positions", profile)[2][0]))

    def row_bytes(self, name: str) -> int:
        """Bytes of one row of a tensor [B, q, H]."""
        return int(self._engine.get_tensor_shape(name)[-1]) * int(self._engine.get_tensor_dtype(name).itemsize)

    def check_cell(self, profile: int, cell: Cell) -> CellShape:
        """The profile's shape, which must serve the cell. Raises ArtifactError with both."""
        shape = self.shape(profile)
        serves = shape.batch == cell.batch and shape.rows >= cell.query_rows and shape.tier >= cell.kv_tier
        if not serves or shape.logit_rows < cell.logit_rows:
            raise ArtifactError(f"profile {profile} of the engine is {shape}, which does not serve {cell.label}")
        return shape

    def check_states(self, states: Sequence[StateSpec]) -> None:
        """Names, types and shapes of every state, against what the manifest says. Raises ArtifactError."""
        for state in states:
            for name in (state.input, state.output):
                if name not in self.names:
                    raise ArtifactError(f"the engine has no tensor {name}, which the manifest names")
            shape = tuple(int(d) for d in self._engine.get_tensor_shape(state.input))[1:]
            if shape != state.shape:
                raise ArtifactError(f"state {state.input}: the engine has {shape}, the manifest says {state.shape}")

    def context(self, profile: int, shapes: Mapping[str, tuple[int, ...]], scratch: int, stream: Stream) -> Any:
        """An execution context of one profile on the shared scratch buffer, with every input shape set."""
        trt = self.trt
        context = (
            self._engine.create_execution_context(self._config)
            if self._config is not None
            else self._engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        )
        if context is None:
            raise BackendError(f"no execution context for profile {profile}: {self.log.last()}")
        if not context.set_optimization_profile_async(profile, stream.handle):
            raise BackendError(f"profile {profile} cannot be selected: {self.log.last()}")
        context.set_device_memory(scratch, self.scratch_by_profile[profile])
        for name, dims in shapes.items():
            if name in self.names and not context.set_input_shape(name, dims):
                raise BackendError(f"input {name} cannot have shape {dims}: {self.log.last()}")
        return context

    def input_shapes(self, shape: CellShape, states: Sequence[StateSpec]) -> dict[str, tuple[int, ...]]:
        """Of every input of a decoder's plan; some it may not have."""
        names = ("length", "valid", "forced", "temperature", "top_k", "top_p", "following")
        return {
            "tokens": (shape.batch, shape.rows),
            "kv_positions": (shape.tier,),
            "uniform": (shape.batch, shape.logit_rows),
            **dict.fromkeys(names, (shape.batch,)),
            **{state.input: (shape.batch, *state.shape) for state in states},
        }

    def draft_input_shapes(self, shape: CellShape, states: Sequence[StateSpec]) -> dict[str, tuple[int, ...]]:
        """Of every input of a drafter's plan."""
        widths = {name: int(self._engine.get_tensor_shape(name)[-1]) for name in ("embedding", "hidden")}
        return {
            "kv_positions": (shape.tier,),
            **{name: (shape.batch, shape.rows, width) for name, width in widths.items()},
            **dict.fromkeys(("length", "new_length"), (shape.batch,)),
            **{state.input: (shape.batch, *state.shape) for state in states},
        }

    def close(self) -> None:
        self._config = self._cache = self._engine = self._runtime = None
