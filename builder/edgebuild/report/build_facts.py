"""build.json: what a build measured, kept in the artifact so that its report can be drawn again.

Only what the same inputs give again on the same machine: no memory of a process, no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgebuild.report.evidence import BUILD_FACTS, read_object
from edgebuild.report.memory import measured_lines

if TYPE_CHECKING:
    from edgert.manifest import Manifest
    from edgert.selfcheck import SelfCheck


def build_facts(
    directory: Path, manifest: Manifest, checked: SelfCheck | None, card: Mapping[str, Any]
) -> dict[str, Any]:
    """The document. An earlier one in `directory` is kept where this build has nothing newer.

    checked  what the artifact said of itself on this machine; None = it cannot run here
    card     of the drafter, {} = there is none, or it is in the earlier document
    """
    earlier = read_object(directory / BUILD_FACTS) if (directory / BUILD_FACTS).is_file() else {}
    common = {"format_version": 1, "acceptance": card.get("acceptance") or earlier.get("acceptance") or {}}
    if checked is None:
        weights = sum(path.stat().st_size for path in directory.glob("decoder.*"))
        return {**common, "cells": [], "golden": None, "memory": {"weights": weights}}
    ledger = {line.label: line.bytes for line in manifest.ledger}
    return {
        **common,
        "cells": [asdict(state) for state in checked.cells],
        "golden": asdict(checked.golden),
        "memory": measured_lines(checked.memory, ledger),
    }
