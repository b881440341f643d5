"""What was measured, from wherever it was measured: the build, `edgert doctor`, `edgert bench`, a tuning logbook.

Each source is read once and checked against the artifact, so that figures of another model are never drawn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgert.manifest_records import MANIFEST_NAME

from edgebuild.errors import ReportError

if TYPE_CHECKING:
    from edgebuild.tune.logbook import Logbook
    from edgebuild.tune.records import Curve, Result, Trial

BUILD_FACTS = "build.json"
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Evidence:
    """Everything that is known beyond the plan. {} and () = nobody measured it.

    build    of build.json: golden, memory (ledger line → bytes), acceptance (set → task → entry) and cells
    doctor   the document of `edgert doctor --json`
    benches  (name, report of `edgert bench --json`)
    trials   of the logbook's last run of this artifact, in order; chosen: number of the winner, None = not ended;
             curve: draft lengths against each other, None = not measured
    notes    what a reader must know of the sources
    """

    build: Mapping[str, Any] = field(default_factory=dict)
    doctor: Mapping[str, Any] = field(default_factory=dict)
    benches: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    trials: tuple[Trial, ...] = ()
    chosen: int | None = None
    notes: tuple[str, ...] = ()
    curve: Curve | None = None


def gather(
    artifact: Path,
    identity: str,
    *,
    doctor: Path | None = None,
    benches: Sequence[Path] = (),
    tuning: Path | None = None,
) -> Evidence:
    """Read every source. identity: of the artifact's model. Raises ReportError or TuningError."""
    path = artifact / BUILD_FACTS
    build = read_object(path) if path.is_file() else {}
    found: Mapping[str, Any] = {} if doctor is None else _doctor(doctor, identity)
    measured = tuple((each.stem, _bench(each)) for each in benches)
    if tuning is None:
        return Evidence(build, found, measured)
    from edgert.integrity import sha256_file

    from edgebuild.tune.logbook import read_logbook

    book = read_logbook(tuning)
    trials, result, notes = pick_trials(book, sha256_file(artifact / MANIFEST_NAME), identity, tuning)
    if result is None:
        return Evidence(build, found, measured, trials, None, notes)
    return Evidence(build, found, measured, trials, result.trial, (*notes, *result.notes), result.curve)


def pick_trials(
    book: Logbook, manifest_sha256: str, identity: str, path: Path
) -> tuple[tuple[Trial, ...], Result | None, tuple[str, ...]]:
    """The last run's trials of this artifact; else of another build of the same model, which is said."""
    notes: tuple[str, ...] = ()
    own = [trial for trial in book.trials if trial.artifact.sha256 == manifest_sha256]
    if not own:
        own = [trial for trial in book.trials if trial.artifact.model_identity == identity]
        notes = ("The tuning log is of another build of the same model.",)
    if not own:
        names = ", ".join(sorted({trial.artifact.name for trial in book.trials})) or "nothing"
        raise ReportError(f"{path}: no trial of this model; it has trials of {names}", hint="give its own logbook")
    last = own[-1]
    run = [t for t in own if t.artifact.sha256 == last.artifact.sha256 and t.workload.sha256 == last.workload.sha256]
    numbers = {trial.number for trial in run}
    ended = [r for r in book.results if r.artifact.sha256 == last.artifact.sha256 and r.trial in numbers]
    if ended:
        later = [trial for trial in run if trial.number > max(ended[-1].steps, default=0)]
        run = [trial for trial in run if trial.number in ended[-1].steps] + [t for t in later if t.step == "soak"]
    if book.torn_bytes:
        notes = (*notes, f"The logbook's last line was half written ({book.torn_bytes} bytes) and is left out.")
    return tuple(run), ended[-1] if ended else None, notes


def _doctor(path: Path, identity: str) -> dict[str, Any]:
    document = read_object(path)
    if document.get("format_version") != 1 or "findings" not in document:
        raise ReportError(f"{path}: not a report of edgert doctor", hint="make one: edgert doctor ARTIFACT --json")
    found = (document.get("artifact") or {}).get("identity")
    if found != identity:
        raise ReportError(
            f"{path}: of a model with identity {str(found)[:16]}..., the artifact's is {identity[:16]}...",
            hint="run edgert doctor on this artifact",
        )
    return document


def _bench(path: Path) -> dict[str, Any]:
    document = read_object(path)
    if not {"output_tokens_per_s", "ttft_ms", "requests"} <= document.keys():
        raise ReportError(f"{path}: not a report of edgert bench", hint="make one: edgert bench ARTIFACT ... --json")
    return document


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ReportError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ReportError(f"{path}: {path.stat().st_size:,} bytes, at most {MAX_BYTES:,} are read")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ReportError(f"{path}: expected a JSON object, found {type(document).__name__}")
    return document
