"""scheduler.yaml, read strictly: each value has the right type, and the artifact can do what it asks for.

A user may edit the file, so it is the one file whose hash may differ from the manifest; an impossible edit is refused
here with the line, the reason and the values that are allowed. Knows the manifest's cells, not the scheduler.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from edgert.cells import Cell
from edgert.errors import ArtifactError, ConfigError
from edgert.manifest_records import Manifest
from edgert.strictjson import BAD_YAML_VALUE, read_bounded

log = logging.getLogger("edgert.config")

CONFIG_NAME = "scheduler.yaml"
MAX_CONFIG_BYTES = 1 << 20
MAX_RATIO = 64
MAX_TARGET_MS = 1e7


@dataclass(frozen=True)
class RuntimeConfig:
    """What the scheduler runs by. Keys and meanings are those of scheduler.yaml's `runtime:` mapping.

    prefill_decode_ratio  N of "1:N": decode steps after each prefill chunk while both wait
    graph_batch_sizes     those that `slots` can fill
    """

    adaptive: bool
    enable_chunked_prefill: bool
    max_prefill_chunk_size: int
    prefill_decode_ratio: int
    prefill_decode_ratio_range: tuple[int, int]
    enable_cuda_graph: bool
    graph_bucket_sizes: tuple[int, ...]
    graph_batch_sizes: tuple[int, ...]
    kv_tiers: tuple[int, ...]
    enable_mtp: bool
    mtp_num_heads: int
    mtp_acceptance_threshold: float
    ttft_target_ms: float | None
    itl_target_ms: float | None
    itl_p95_ratio: float | None
    tpot_target_ms: float | None
    slots: int
    context_tokens: int
    queue_limit: int
    throughput_headroom_fraction: float
    warm_up: bool
    check_golden_at_load: bool
    memory_margin_fraction: float
    memory_headroom_bytes: int
    soft_temperature_c: float | None
    hard_temperature_c: float | None
    power_mode: str | None

    @property
    def draft_length(self) -> int:
        """Tokens drafted per decode step: 0 with MTP off."""
        return self.mtp_num_heads if self.enable_mtp else 0

    def select_cells(self, manifest: Manifest) -> tuple[Cell, ...]:
        """The artifact's cells that this configuration may launch. Left out is what another serves as well: a tier past
        one that serves the context, more rows to verify than there are drafts."""
        allowed = [
            cell
            for cell in manifest.cells
            if (
                cell.query_rows in self.graph_bucket_sizes and cell.query_rows <= self.max_prefill_chunk_size
                if cell.kind == "prefill"
                else cell.batch in self.graph_batch_sizes and cell.kv_tier in self.kv_tiers
            )
        ]
        tier: dict[tuple[str, int, int], int] = {}
        rows: dict[tuple[str, int, int], int] = {}
        for cell in allowed:
            if cell.kv_tier >= self.context_tokens:
                shape = (cell.kind, cell.batch, cell.query_rows)
                tier[shape] = min(cell.kv_tier, tier.get(shape, cell.kv_tier))
            if cell.kind == "decode" and cell.query_rows > self.draft_length:
                place = (cell.kind, cell.batch, cell.kv_tier)
                rows[place] = min(cell.query_rows, rows.get(place, cell.query_rows))
        return tuple(
            cell
            for cell in allowed
            if cell.kv_tier <= tier.get((cell.kind, cell.batch, cell.query_rows), cell.kv_tier)
            and cell.query_rows <= rows.get((cell.kind, cell.batch, cell.kv_tier), cell.query_rows)
        )


CONFIG_KEYS = tuple(field.name for field in fields(RuntimeConfig))
_FILE = "the file"


def load_config(directory: Path, manifest: Manifest, overrides: Mapping[str, Any] | None = None) -> RuntimeConfig:
    """Read `directory/scheduler.yaml` against its manifest; `overrides` replace keys and are checked as the file is.

    Raises ConfigError, or ArtifactError when the file is unreadable.
    """
    data = read_bounded(Path(directory) / CONFIG_NAME, MAX_CONFIG_BYTES)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{CONFIG_NAME}: byte {error.start} is not UTF-8", hint="save it as UTF-8") from None
    return parse_config(text, manifest, overrides)


def default_config(manifest: Manifest) -> RuntimeConfig:
    """Everything the artifact has, switched on: what the plan writes when nothing was measured otherwise."""
    chunks = tuple(sorted({cell.query_rows for cell in manifest.prefill_cells}))
    return RuntimeConfig(
        adaptive=True,
        enable_chunked_prefill=True,
        max_prefill_chunk_size=chunks[-1],
        prefill_decode_ratio=6,
        prefill_decode_ratio_range=(4, 8),
        enable_cuda_graph=True,
        graph_bucket_sizes=chunks,
        graph_batch_sizes=tuple(sorted({cell.batch for cell in manifest.decode_cells})),
        kv_tiers=tuple(sorted({cell.kv_tier for cell in manifest.decode_cells})),
        enable_mtp=manifest.draft_length > 0,
        mtp_num_heads=manifest.draft_length,
        mtp_acceptance_threshold=0.0,
        ttft_target_ms=None,
        itl_target_ms=None,
        itl_p95_ratio=None,
        tpot_target_ms=None,
        slots=manifest.slots,
        context_tokens=manifest.context_tokens,
        queue_limit=256,
        throughput_headroom_fraction=0.0,
        warm_up=True,
        check_golden_at_load=True,
        memory_margin_fraction=0.1,
        memory_headroom_bytes=0,
        soft_temperature_c=None,
        hard_temperature_c=None,
        power_mode=None,
    )


# Keys that artifacts of an earlier version lack, and what holds then.
NEWER_KEYS = {
    "adaptive": "true",
    "ttft_target_ms": "null",
    "itl_target_ms": "null",
    "itl_p95_ratio": "null",
    "tpot_target_ms": "null",
    "throughput_headroom_fraction": "0.0",
}


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases: no key is written twice by reference, and no alias bomb unfolds."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases are not used here", problem_mark=self.get_mark())
        return super().compose_node(parent, index)


@dataclass(frozen=True)
class _Entry:
    """One key's YAML node."""

    key: str
    node: yaml.Node
    overridden: bool = False

    def fail(self, message: str, *, hint: str | None = None) -> ConfigError:
        where = "override" if self.overridden else f"{CONFIG_NAME}:{self.node.start_mark.line + 1}"
        return ConfigError(f"{where}: {self.key}: {message}", hint=hint)

    def _scalar(self, node: yaml.Node, expected: str) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise self.fail(f"expected {expected}, found a list or a mapping")
        try:
            return yaml.safe_load(yaml.serialize(node))
        except (yaml.YAMLError, *BAD_YAML_VALUE):
            raise self.fail(f"expected {expected}, found {node.value[:40]!r}") from None

    def flag(self) -> bool:
        value = self._scalar(self.node, "true or false")
        if not isinstance(value, bool):
            raise self.fail(f"expected true or false, found {value!r}")
        return value

    def integer(self, low: int, high: int, node: yaml.Node | None = None, note: str = "") -> int:
        expected = f"a whole number from {low} to {high}{note}"
        value = self._scalar(node or self.node, expected)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(f"expected {expected}, found {str(value)[:40]}")
        return value

    def number(self, low: float, high: float) -> float:
        value = self._scalar(self.node, f"a number from {low} to {high}")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(f"expected a number from {low} to {high}, found {str(value)[:40]}")
        return float(value)

    def number_or_null(self, low: float, high: float) -> float | None:
        expected = f"a number from {low:g} to {high:g}, or null"
        value = self._scalar(self.node, expected)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(f"expected {expected}, found {str(value)[:40]}")
        return float(value)

    def name_or_null(self) -> str | None:
        # the node's own text: a mode such as 15W is a name, and so is one that YAML would read as a number
        value = self._scalar(self.node, "a name, or null")
        if value is None:
            return None
        text = self.node.value if isinstance(self.node, yaml.ScalarNode) else ""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}", text):
            raise self.fail(f"expected a name, or null, found {text[:40]!r}")
        return text

    def integers(self, least: int, most: int) -> tuple[int, ...]:
        if not isinstance(self.node, yaml.SequenceNode) or not least <= len(self.node.value) <= most:
            raise self.fail(f"expected a list of {least} to {most} whole numbers")
        return tuple(self.integer(1, 1 << 24, node) for node in self.node.value)

    def subset(self, captured: set[int], what: str) -> tuple[int, ...]:
        """An ascending list whose every value was captured."""
        values = self.integers(1, 256)
        if list(values) != sorted(set(values)):
            raise self.fail(f"{list(values)} is not ascending without repeats")
        missing = [value for value in values if value not in captured]
        if missing:
            raise self.fail(
                f"{', '.join(map(str, missing))} was not captured in this artifact",
                hint=f"allowed {what}: {', '.join(map(str, sorted(captured)))}; rebuild for others",
            )
        return values

    def ratio(self) -> int:
        # the node's own text: YAML 1.1 reads an unquoted 1:6 as sixty-six
        text = self.node.value if isinstance(self.node, yaml.ScalarNode) else ""
        match = re.fullmatch(r"1:([0-9]{1,4})", text)
        if not match or not 1 <= int(match[1]) <= MAX_RATIO:
            raise self.fail(f'expected "1:N" with N from 1 to {MAX_RATIO}, found {text[:40]!r}')
        return int(match[1])


def _entries(text: str) -> dict[str, _Entry]:
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{CONFIG_NAME}:{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, *BAD_YAML_VALUE) as error:
        raise ConfigError(f"{CONFIG_NAME}: not valid YAML: {str(error).splitlines()[0]}") from None
    top = _members(root, _FILE, ["runtime"])
    return _members(top["runtime"].node, "runtime", list(CONFIG_KEYS))


def _members(node: yaml.Node | None, where: str, keys: list[str]) -> dict[str, _Entry]:
    """The entries of a mapping that has exactly `keys`."""
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1 if node else 1
        raise ConfigError(f"{CONFIG_NAME}:{line}: {where} is not a mapping with {keys[0]!r}")
    found: dict[str, _Entry] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
        if key in found:
            raise ConfigError(f"{CONFIG_NAME}:{line}: {key} stands twice")
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1, cutoff=0.0)
            hint = f"the nearest valid key is {near[0]}" if near else f"valid: {', '.join(keys)}"
            if where == _FILE and key in CONFIG_KEYS:
                hint = f"{key} belongs under runtime: indent the line as those above it are"
            raise ConfigError(f"{CONFIG_NAME}:{line}: unknown key {key[:60]!r} in {where}", hint=hint)
        found[key] = _Entry(key, value)
    for key in keys:
        if key not in found and key in NEWER_KEYS:
            newer = yaml.compose(NEWER_KEYS[key], Loader=_Loader)
            found[key] = _Entry(key, newer if newer is not None else node)
        if key not in found:
            raise ConfigError(f"{CONFIG_NAME}: {key} is missing in {where}", hint="put the line back")
    return found


def parse_config(text: str, manifest: Manifest, overrides: Mapping[str, Any] | None = None) -> RuntimeConfig:
    """A RuntimeConfig from the file's text; raises ConfigError for what this artifact cannot do."""
    at = _entries(text)
    for key, value in (overrides or {}).items():
        if key not in at:
            near = difflib.get_close_matches(key, at, 1, cutoff=0.0)
            raise ConfigError(f"override: unknown key {key[:60]!r}", hint=f"the nearest valid key is {near[0]}")
        plain = list(value) if isinstance(value, tuple) else value
        try:
            node = yaml.compose(yaml.safe_dump(plain), Loader=_Loader)
        except yaml.YAMLError:
            raise ConfigError(f"override: {key}: {type(value).__name__} is not a plain value") from None
        if node is not None:
            at[key] = _Entry(key, node, overridden=True)
    if at["enable_mtp"].flag() and manifest.draft_length == 0:  # before mtp_num_heads, whose range is empty then
        raise at["enable_mtp"].fail("this artifact has no drafter", hint="set it to false, or rebuild with MTP")
    bounds = at["prefill_decode_ratio_range"].integers(2, 2)
    config = RuntimeConfig(
        adaptive=at["adaptive"].flag(),
        enable_chunked_prefill=at["enable_chunked_prefill"].flag(),
        max_prefill_chunk_size=at["max_prefill_chunk_size"].integer(1, 1 << 24),
        prefill_decode_ratio=at["prefill_decode_ratio"].ratio(),
        prefill_decode_ratio_range=(bounds[0], bounds[1]),
        enable_cuda_graph=at["enable_cuda_graph"].flag(),
        graph_bucket_sizes=at["graph_bucket_sizes"].subset({c.query_rows for c in manifest.prefill_cells}, "chunks"),
        graph_batch_sizes=at["graph_batch_sizes"].subset({c.batch for c in manifest.decode_cells}, "batch sizes"),
        kv_tiers=at["kv_tiers"].subset({c.kv_tier for c in manifest.decode_cells}, "tiers"),
        enable_mtp=at["enable_mtp"].flag(),
        mtp_num_heads=at["mtp_num_heads"].integer(0, manifest.draft_length, note=", the artifact's draft length"),
        mtp_acceptance_threshold=at["mtp_acceptance_threshold"].number(0.0, 1.0),
        ttft_target_ms=at["ttft_target_ms"].number_or_null(0.001, MAX_TARGET_MS),
        itl_target_ms=at["itl_target_ms"].number_or_null(0.001, MAX_TARGET_MS),
        itl_p95_ratio=at["itl_p95_ratio"].number_or_null(1.0, 1e3),
        tpot_target_ms=at["tpot_target_ms"].number_or_null(0.001, MAX_TARGET_MS),
        slots=at["slots"].integer(1, manifest.slots, note=", the artifact's slots"),
        context_tokens=at["context_tokens"].integer(1, manifest.context_tokens, note=", the artifact's context"),
        queue_limit=at["queue_limit"].integer(0, 1_000_000),
        throughput_headroom_fraction=at["throughput_headroom_fraction"].number(0.0, 0.9),
        warm_up=at["warm_up"].flag(),
        check_golden_at_load=at["check_golden_at_load"].flag(),
        memory_margin_fraction=at["memory_margin_fraction"].number(0.0, 0.5),
        memory_headroom_bytes=at["memory_headroom_bytes"].integer(0, 1 << 46),
        soft_temperature_c=at["soft_temperature_c"].number_or_null(0.0, 150.0),
        hard_temperature_c=at["hard_temperature_c"].number_or_null(0.0, 150.0),
        power_mode=at["power_mode"].name_or_null(),
    )
    config = _fill(config)
    _check_together(config, manifest, at)
    return config


def _fill(config: RuntimeConfig) -> RuntimeConfig:
    """Without the decode batches that the slots cannot fill: who lowers `slots` need not know what else hangs on it."""
    kept = tuple(batch for batch in config.graph_batch_sizes if batch <= config.slots)
    if kept == config.graph_batch_sizes:
        return config
    dropped = ", ".join(str(batch) for batch in config.graph_batch_sizes if batch not in kept)
    log.warning("%s: slots is %d, decode batches of %s are not used", CONFIG_NAME, config.slots, dropped)
    return replace(config, graph_batch_sizes=kept)


def _check_together(config: RuntimeConfig, manifest: Manifest, at: dict[str, _Entry]) -> None:
    low, high = config.prefill_decode_ratio_range
    if not 1 <= low <= high <= MAX_RATIO:
        raise at["prefill_decode_ratio_range"].fail(f"[{low}, {high}] is not ascending within 1 to {MAX_RATIO}")
    if not low <= config.prefill_decode_ratio <= high:
        raise at["prefill_decode_ratio"].fail(
            f"1:{config.prefill_decode_ratio} lies outside prefill_decode_ratio_range [{low}, {high}]",
            hint="widen the range or move the ratio",
        )
    if config.max_prefill_chunk_size not in config.graph_bucket_sizes:
        raise at["max_prefill_chunk_size"].fail(
            f"{config.max_prefill_chunk_size} is not among graph_bucket_sizes",
            hint=f"allowed: {', '.join(map(str, config.graph_bucket_sizes))}",
        )
    if 1 not in config.graph_batch_sizes:
        raise at["graph_batch_sizes"].fail("batch 1 is missing: a sequence alone could not decode")
    cells = config.select_cells(manifest)
    for kind, key in (("decode", "kv_tiers"), ("prefill", "graph_bucket_sizes")):
        reach = max((cell.kv_tier for cell in cells if cell.kind == kind and cell.batch == 1), default=0)
        if reach < config.context_tokens:
            raise at[key].fail(
                f"{kind} reaches {reach} positions, context_tokens is {config.context_tokens}",
                hint="keep the largest tier, or lower context_tokens",
            )
    if config.enable_mtp and config.mtp_num_heads == 0:
        raise at["mtp_num_heads"].fail("0 heads with enable_mtp: true", hint=f"1 to {manifest.draft_length}")
    soft, hard = config.soft_temperature_c, config.hard_temperature_c
    if soft is not None and hard is not None and hard <= soft:
        raise at["hard_temperature_c"].fail(f"{hard:g} is not above soft_temperature_c ({soft:g})")
