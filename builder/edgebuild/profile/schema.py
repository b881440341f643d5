"""What a profile may say: the device, the limits, the mechanisms. Shapes and bounds only: `loader` knows files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from edgebuild.profile.units import PATTERN, parse_bytes

Backend = Literal["tensorrt", "tensorrt-rtx", "onnxruntime"]
Precision = Literal["float32", "float16", "bfloat16"]

DEFAULT_DRAFT_LENGTH = 3
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # of a profile
ELEMENT_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


def _capability(value: object) -> object:
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        raise ValueError(f'{value} is a number here: write it as a text, "{float(value):.1f}"')
    return value


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _path(value: object) -> object:
    return Path(value) if isinstance(value, str) and value.strip() else value


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    Field(ge=0),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": PATTERN}]}),
]
Capability = Annotated[str, BeforeValidator(_capability), Field(pattern=r"^\d{1,2}\.\d$")]
Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_tuple)]
Capabilities = Annotated[tuple[Capability, ...], BeforeValidator(_tuple)]
Celsius = Annotated[float, Field(ge=0, le=150, allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1)]
FilePath = Annotated[Path, BeforeValidator(_path), WithJsonSchema({"type": "string", "minLength": 1})]


def impossible(key: str, message: str) -> PydanticCustomError:
    """An error about the value of one key of a section."""
    return PydanticCustomError("impossible", "{message}", {"key": key, "message": message})


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Device(_Section):
    """The machine, as its data sheet and its system describe it."""

    memory_bytes: Bytes = Field(description="Memory of the device, such as `64 GB`; on unified memory all of it.")
    unified_memory: bool = Field(description="CPU and GPU share this memory.")
    bandwidth_gb_per_s: float = Field(gt=0, le=100_000, description="Peak memory bandwidth, 10^9 bytes a second.")
    compute_capability: Capability | None = Field(default=None, description='CUDA, such as "8.7"; null = no GPU.')
    aot_targets: Capabilities = Field(
        default=(),
        description="tensorrt-rtx: compute capabilities the engine is built for; empty = compute_capability alone.",
    )
    multiprocessors: Positive | None = Field(
        default=None, description="Streaming multiprocessors, for which matrix products are cut; null = not cut."
    )
    power_modes: Names = Field(default=(), description="Power modes by the names that nvpmodel prints.")
    power_mode: str | None = Field(default=None, description="The mode this profile expects; the runtime warns else.")
    temperature_soft_c: Celsius | None = Field(default=None, description="From here on fewer slots are active.")
    temperature_hard_c: Celsius | None = Field(default=None, description="From here on nothing new is admitted.")

    @model_validator(mode="after")
    def _possible(self) -> Device:
        if self.memory_bytes < 64 << 20:
            raise impossible("memory_bytes", f"{self.memory_bytes:,} bytes hold no model: at least 64 MiB is expected")
        soft, hard = self.temperature_soft_c, self.temperature_hard_c
        if soft is not None and hard is not None and hard <= soft:
            raise impossible("temperature_hard_c", f"{hard:g} °C is not above temperature_soft_c ({soft:g} °C)")
        if self.power_mode is not None and self.power_mode not in self.power_modes:
            known = ", ".join(self.power_modes) or "none"
            raise impossible("power_mode", f"{self.power_mode!r} is not among power_modes ({known})")
        if len(set(self.power_modes)) != len(self.power_modes):
            raise impossible("power_modes", "a mode is named twice")
        if self.aot_targets and self.compute_capability is None:
            raise impossible("aot_targets", "targets are given but compute_capability is null")
        return self


class Limits(_Section):
    """What the build may use of the device."""

    memory_margin_fraction: float = Field(
        default=0.12, ge=0.10, le=0.15, description="Share of the memory that is left to the system."
    )
    headroom_fraction: float = Field(
        default=0.20, ge=0.0, le=0.9, description="Share of the planned memory that should stay free at the peak."
    )
    throughput_headroom_fraction: float = Field(
        default=0.20, ge=0.0, le=0.9, description="Share of the measured throughput that admission leaves free."
    )
    slots: int = Field(default=4, ge=1, le=256, description="Sequences that run at the same time.")
    context_tokens: int = Field(default=4096, ge=16, le=1 << 22, description="Prompt + output tokens of one slot.")
    max_prefill_cells: int = Field(default=11, ge=1, le=64, description="Captured prefill shapes at most.")
    max_decode_cells: int = Field(default=12, ge=1, le=64, description="Captured decode shapes at most.")
    graph_memory_bytes: Bytes = Field(default=512 << 20, description="Memory that captured graphs may take together.")
    min_chunk: int = Field(default=16, ge=1, le=1 << 20, description="Smallest prefill chunk, tokens.")
    max_chunk: int = Field(default=2048, ge=1, le=1 << 20, description="Largest prefill chunk, tokens.")
    max_drift_fraction: float = Field(
        default=0.05, ge=0.0, le=10.0, description="Most that latency or memory may grow over a soak of `tune`."
    )

    @model_validator(mode="after")
    def _possible(self) -> Limits:
        if self.min_chunk > self.max_chunk:
            raise impossible("max_chunk", f"{self.max_chunk} is below min_chunk ({self.min_chunk})")
        if self.min_chunk > self.context_tokens:
            raise impossible("min_chunk", f"{self.min_chunk} is above context_tokens ({self.context_tokens})")
        return self


class Mechanisms(_Section):
    """What the runtime does beyond the plain loop; each can be switched off for a baseline."""

    enable_chunked_prefill: bool = Field(default=True, description="Long prompts in chunks, decode steps in between.")
    enable_cuda_graph: bool = Field(default=True, description="One captured graph a cell; no effect without a GPU.")
    enable_mtp: bool = Field(default=False, description="Draft tokens with the model's multi-token-prediction module.")
    mtp_num_heads: int = Field(default=1, ge=1, le=8, description="MTP modules that the checkpoint holds.")
    mtp_acceptance_threshold: float = Field(
        default=0.6, ge=0.0, le=1.0, description="Measured acceptance below this switches drafting off."
    )


class Draft(_Section):
    """How many tokens are proposed each step."""

    length: int = Field(default=0, ge=0, le=8, description="Largest draft length k; 0 = no drafting.")
    vocabulary: Positive | None = Field(default=None, description="Tokens that may be drafted; null = every token.")


class PrefillDecodeRatio(_Section):
    """Decode steps after each prefill chunk, by backlog."""

    min: int = Field(default=4, ge=1, le=64)
    max: int = Field(default=8, ge=1, le=64)

    @model_validator(mode="after")
    def _possible(self) -> PrefillDecodeRatio:
        if self.min > self.max:
            raise impossible("min", f"{self.min} is above max ({self.max})")
        return self


class Scheduling(_Section):
    """How prefill and decode share the device."""

    prefill_decode_ratio: PrefillDecodeRatio = PrefillDecodeRatio()


class Slo(_Section):
    """Latencies that the plan should keep, where it can choose."""

    ttft_ms: float | None = Field(default=None, gt=0, description="Time to first token.")
    itl_ms: float | None = Field(default=None, gt=0, description="Longest gap between two tokens of a stream.")
    itl_p95_ratio: float | None = Field(
        default=None, gt=1, le=1000, description="p95 of a stream's gaps while a prompt is read ÷ its gap when alone."
    )
    tpot_ms: float | None = Field(default=None, gt=0, description="Mean time per token after the first.")


class Profile(_Section):
    """One device and how it is to be used."""

    name: str = Field(min_length=1, max_length=64, pattern=NAME)
    description: str = Field(min_length=1)
    backend: Backend
    precision: Precision
    device: Device
    limits: Limits = Limits()
    mechanisms: Mechanisms = Mechanisms()
    draft: Draft = Draft()
    scheduling: Scheduling = Scheduling()
    slo: Slo = Slo()
    model: FilePath | None = Field(default=None, description="Checkpoint; relative to the profile's folder.")
    drafter: FilePath | None = Field(
        default=None,
        description="MTP head from train-mtp, relative to the profile's folder; null = the checkpoint's.",
    )
    traffic: FilePath | None = Field(default=None, description="Trace or histogram; relative to the profile's folder.")

    @model_validator(mode="after")
    def _possible(self) -> Profile:
        if self.backend == "onnxruntime":
            if self.precision != "float32":
                raise impossible("precision", f"{self.precision!r}: the onnxruntime backend runs float32")
        elif self.device.compute_capability is None:
            raise impossible("backend", f"{self.backend!r} needs device.compute_capability, which is null")
        if self.device.aot_targets and self.backend != "tensorrt-rtx":
            raise impossible("backend", f"{self.backend!r} has no device.aot_targets: only tensorrt-rtx builds ahead")
        if self.draft.length and not self.mechanisms.enable_mtp:
            raise impossible("draft", f"draft.length is {self.draft.length} but mechanisms.enable_mtp is false")
        return self

    def with_drafter(self, head: Path, *, vocabulary: int | None = None, length: int = DEFAULT_DRAFT_LENGTH) -> Profile:
        """This profile with an MTP head. `vocabulary` goes over its own; `length`: where it asks for none."""
        draft = {"length": self.draft.length or length, "vocabulary": vocabulary or self.draft.vocabulary}
        return self.model_copy(
            update={
                "drafter": head,
                "draft": self.draft.model_copy(update=draft),
                "mechanisms": self.mechanisms.model_copy(update={"enable_mtp": True}),
            }
        )

    @property
    def compute_capability(self) -> str | None:
        """Compute capability of the device, or None without a GPU."""
        return self.device.compute_capability

    @property
    def compute_capabilities(self) -> tuple[str, ...]:
        """What the engine is built for: the targets named, else the device's own capability; empty without a GPU."""
        own = self.device.compute_capability
        return self.device.aot_targets or (() if own is None else (own,))

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight or cache element at this precision."""
        return ELEMENT_BYTES[self.precision]

    @property
    def budget_bytes(self) -> int:
        """Device memory less the system's margin."""
        return int(self.device.memory_bytes * (1.0 - self.limits.memory_margin_fraction))


def json_schema() -> dict[str, Any]:
    """JSON Schema of a profile file, for editors. A file that `extends` another may leave out what that one says."""
    schema = Profile.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "Another profile, by name or relative path; this file's keys go over its keys.",
    }
    required = schema.pop("required")
    schema["if"] = {"not": {"required": ["extends"]}}
    schema["then"] = {"required": required}
    # a section may be partial where it completes an extended profile
    device = schema["$defs"]["Device"]
    device["description"] += " Required unless `extends` gives them: " + ", ".join(device.pop("required")) + "."
    return schema
