"""`python -m edgert.selfcheck ARTIFACT`: open the backend and run the golden vectors, in a process of its own.

The builder calls it before it publishes: what is checked is the runtime alone, without torch in memory. Prints one JSON
object; an error is one line on stderr and its exit code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgert.capture import CellState, artifact_states
from edgert.errors import EdgertError
from edgert.golden import GoldenReport, check_golden, load_golden
from edgert.loading import Loading, Runtime, open_runtime, plan_loading


@dataclass(frozen=True)
class SelfCheck:
    """memory: bytes by part, as the backend says; cells: how each runs here."""

    golden: GoldenReport
    memory: Mapping[str, int]
    cells: tuple[CellState, ...]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SelfCheck:
        """What `main` printed."""
        cells = tuple(CellState(**each) for each in document["cells"])
        return cls(GoldenReport(**document["golden"]), document["memory"], cells)


def check_artifact(directory: Path, options: Mapping[str, Any] | None = None) -> SelfCheck:
    """Run every golden case through the cells that requests will use. Raises EdgertError.

    options: as for `Engine.load`. Where cells are captured they are captured here too; where they are not there is
    nothing that a warm-up would show.
    """
    loading = plan_loading(directory, options or {})
    manifest, config = loading.manifest, loading.config
    warm = manifest.backend.name != "onnxruntime" and config.warm_up
    loading = replace(loading, golden=None, config=replace(config, warm_up=warm))
    runtime = open_runtime(loading)
    states = artifact_states(manifest, config, runtime.description)
    return SelfCheck(run_golden(runtime, loading), runtime.memory_bytes, states)


def run_golden(runtime: Runtime, loading: Loading) -> GoldenReport:
    """The golden vectors of `loading` on the opened `runtime`, which is closed afterwards. Raises EdgertError."""
    try:
        return check_golden(
            runtime.backend,
            load_golden(loading.directory, loading.manifest.model),
            cells=loading.cells,
            slots=runtime.limits.slots,
            context_tokens=runtime.limits.context_tokens,
            draft_length=loading.config.draft_length,
        )
    finally:
        runtime.backend.close()


def main(arguments: list[str]) -> int:
    try:
        report = check_artifact(Path(arguments[0]), json.loads(arguments[1]) if len(arguments) > 1 else None)
    except EdgertError as error:
        print(str(error), file=sys.stderr)
        return error.exit_code
    print(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
