"""What a line of the logbook says. Two kinds of line: `trial` (one measurement) and `result` (the end of a tuning run).

Every line stands alone: it names artifact, device, versions and workload. Unknown is null, never 0. Plain frozen data,
read strictly; no file and no decision here.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

FORMAT_VERSION: Final = 1

# Order of the trials: the three mechanisms one after the other, then the refinements, the draft curve, the soak.
Step = Literal[
    "baseline",
    "chunked_prefill",
    "cuda_graph",
    "mtp",
    "chunk_size",
    "kv_tiers",
    "ratio",
    "draft_length",
    "adaptive",
    "draft_curve",
    "soak",
]
# wins: beyond the spread, and kept. no gain: within the spread. loses: beyond the spread, or pays too much elsewhere.
# measured: a point of the draft curve, which decides nothing by itself. steady, drifts: of a soak.
Verdict = Literal["baseline", "wins", "no gain", "loses", "failed", "not applicable", "measured", "steady", "drifts"]
Sha256 = Field(pattern=r"^[0-9a-f]{64}$")
# A tuned key of scheduler.yaml and its value, e.g. {"enable_mtp": true, "mtp_num_heads": 3, "kv_tiers": [512, 4096]}
Setting = bool | int | float | str | tuple[int, ...]


class Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class ArtifactId(Record):
    """sha256: of manifest.json, which has every file's. config_sha256: of scheduler.yaml without what is tuned."""

    name: str
    sha256: str = Sha256
    engine_sha256: str = Sha256
    config_sha256: str = Sha256
    backend: str
    backend_version: str
    precision: str
    model: str
    model_identity: str = Sha256
    draft_length: int
    draft_vocabulary: int


class DeviceId(Record):
    """identity: SHA-256 over the other fields, the driver aside. One device keeps it over reboots and updates."""

    identity: str = Sha256
    name: str
    machine: str
    cores: int | None
    memory_bytes: int | None
    compute_capability: str | None
    driver: str | None


class Workload(Record):
    """What every trial ran. sha256: over the prompts, lengths and tasks of all requests, and concurrency.

    prompts      "own" = the user's text; "built-in" = edgebuild's, by task; "random" = ids, in the trace's lengths
    concurrency  requests at a time; concurrency_source says why so many
    repeats      times that all requests ran in each trial
    """

    sha256: str = Sha256
    traffic: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    concurrency_source: str
    repeats: int
    seed: int
    prompts: Literal["own", "built-in", "random"]
    tasks: tuple[str, ...]


class Conditions(Record):
    """One look at the device. null: this device, driver or sensor does not say."""

    sensors: str
    temperature_c: float | None
    power_w: float | None
    cpu_clock_mhz: float | None
    gpu_clock_mhz: float | None
    memory_clock_mhz: float | None
    throttle_reasons: tuple[str, ...] | None
    memory_available_bytes: int | None


class Figures(Record):
    """Medians over the repeats (times vLLM's; see edgert.metrics), or their spread: largest − smallest."""

    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tpot_ms: float | None
    itl_p95_ms: float | None
    longest_gap_ms: float | None
    output_tokens_per_s: float | None
    goodput_requests_per_s: float | None
    peak_memory_bytes: float | None
    acceptance: float | None
    mean_accepted_length: float | None


class TaskAcceptance(Record):
    """by_position: accepted ÷ verified, given that the positions before were accepted; null = never verified.

    mean_accepted_length: tokens of a step with drafts, the bonus token included. tokens_per_ms: while decoding.
    """

    acceptance: float | None
    by_position: tuple[float | None, ...]
    mean_accepted_length: float | None
    steps: int
    tokens_per_ms: float | None = None


class Drift(Record):
    """Soak: first against last window, as a share of the first (0.05 = 5 % slower, or larger). null: could not be told.

    limit: most that is allowed. pairs: requests that ran in both windows and were compared with themselves.
    """

    seconds: float
    requests: int
    pairs: int
    ttft: float | None
    tpot: float | None
    memory: float | None
    limit: float


class Trial(Record):
    """One measurement.

    number     counts up in one logbook, from 1
    changed    key of scheduler.yaml that differs from trial `against`; before, after: its values. null: nothing changed
    settings   every tuned key in this trial
    samples    each figure of each repeat, in order
    acceptance by task, "" = no task given
    step_ms    draft_curve: ms of one decode step of one sequence, drafting included
    token_counts  plain trial of the curve: of each request, how often each token stood in prompt and output
    outputs_sha256  of all token ids: greedy output must not depend on the settings (half precision may)
    """

    format_version: Literal[1]
    kind: Literal["trial"]
    number: int
    step: Step
    changed: str | None
    before: Setting | None
    after: Setting | None
    against: int | None
    settings: dict[str, Setting]
    artifact: ArtifactId
    device: DeviceId
    versions: dict[str, str]
    workload: Workload
    power_mode: str | None = None
    conditions_before: Conditions | None = None
    conditions_loaded: Conditions | None = None
    conditions_after: Conditions | None = None
    figures: Figures | None = None
    spread: Figures | None = None
    samples: dict[str, tuple[float | None, ...]] = {}
    acceptance: dict[str, TaskAcceptance] = {}
    draft_length: int | None = None
    step_ms: float | None = None
    token_counts: tuple[tuple[tuple[int, int], ...], ...] | None = None
    drift: Drift | None = None
    outputs_sha256: str | None = None
    warnings: tuple[str, ...] = ()
    verdict: Verdict
    reason: str
    duration_s: float
    at: str


class CurvePoint(Record):
    """One draft length of the curve. by_task: tokens per ms and mean accepted length of each task."""

    draft_length: int
    tokens_per_ms: float
    spread: float
    step_ms: float
    mean_accepted_length: float
    by_task: dict[str, TaskAcceptance]


class Curve(Record):
    """Acceptance curve and the pick. acceptance: by position, over all tasks, of the longest draft length measured.

    best_by_task: draft length with most tokens per ms, by task
    """

    points: tuple[CurvePoint, ...]
    acceptance: tuple[float, ...]
    threshold: float
    pick: int
    best_by_task: dict[str, int]
    reason: str


class VocabularyOption(Record):
    """coverage: share of the text's tokens that may be drafted. step_ms: [k + 1], by k; tokens_per_ms of its best k."""

    tokens: int
    coverage: float
    draft_length: int
    tokens_per_ms: float
    step_ms: tuple[float, ...]
    measured: bool


class DraftVocabulary(Record):
    """What `draft_vocabulary` should be. counted: tokens in the text; used_tokens: ids in it, the most used first."""

    counted: int
    used_tokens: tuple[int, ...]
    options: tuple[VocabularyOption, ...]
    pick: int
    reason: str


class Result(Record):
    """The end of a tuning run: what was chosen, and what a later build reads.

    trial       number of the chosen settings' trial; baseline: of the first one
    steps       numbers of the trials of this run, in order
    largest_chunk  prefill chunk sizes of the artifact end here: the chosen one may be smaller
    soak        number of the soak that held; null: none was asked for
    notes       for people
    """

    format_version: Literal[1]
    kind: Literal["result"]
    artifact: ArtifactId
    device: DeviceId
    versions: dict[str, str]
    workload: Workload
    settings: dict[str, Setting]
    baseline: int
    trial: int
    steps: tuple[int, ...]
    figures: Figures
    largest_chunk: int | None = None
    curve: Curve | None
    draft_vocabulary: DraftVocabulary | None
    soak: int | None
    notes: tuple[str, ...]
    at: str


def to_json(record: BaseModel) -> dict[str, Any]:
    """Plain data, as in the logbook."""
    return record.model_dump(mode="json")
