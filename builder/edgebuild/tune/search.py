"""The order of a tuning run: baseline, the three mechanisms, the refinements, the draft curve, the soak.

One change at a time, each a trial, each trial a line of the logbook as soon as it is known. What stands in the logbook
already, for this artifact, device and workload, is not run again. Runner, sensors and clocks are passed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

from edgert.bench import BenchRequest
from edgert.config import RuntimeConfig, load_config
from edgert.errors import ConfigError
from edgert.manifest import Manifest

from edgebuild.errors import TuningError
from edgebuild.progress import Stages
from edgebuild.tune import candidates as options
from edgebuild.tune.candidates import Settings
from edgebuild.tune.curve import make_curve, make_vocabulary
from edgebuild.tune.drift import drift_of, verdict_of
from edgebuild.tune.logbook import Line
from edgebuild.tune.outcome import THROTTLED, found_in, samples_of
from edgebuild.tune.records import (
    FORMAT_VERSION,
    ArtifactId,
    Conditions,
    DeviceId,
    Result,
    Setting,
    Step,
    Trial,
    Verdict,
)
from edgebuild.tune.runner import Runner, TrialFailed
from edgebuild.tune.winner import Goal, judge
from edgebuild.tune.workload import Work, as_job

Samples = Mapping[str, Sequence[float | None]]
Judge = Callable[[Samples], tuple[Verdict, str]]


class Look(Protocol):
    """One look at the device: its conditions and its power mode."""

    def __call__(self) -> tuple[Conditions | None, str | None]: ...


@dataclass(frozen=True)
class Setup:
    """What a run is about. soak_s: 0 = no soak. drift_limit: most that a winner may drift, as a share."""

    path: Path
    manifest: Manifest
    config: RuntimeConfig
    artifact: ArtifactId
    device: DeviceId
    versions: dict[str, str]
    work: Work
    threshold: float
    soak_s: float
    drift_limit: float
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None

    @property
    def slo(self) -> bool:
        return self.slo_ttft_ms is not None or self.slo_tpot_ms is not None


@dataclass
class Tuner:
    """known: lines of the logbook that count; last_number: of its last trial, of whatever artifact.

    append: puts a line into the logbook. now: seconds, for durations; at: the wall clock as text.
    """

    setup: Setup
    runner: Runner
    append: Callable[[Line], None]
    look: Look
    now: Callable[[], float]
    at: Callable[[], str]
    stages: Stages
    known: Sequence[Trial] = ()
    last_number: int = 0
    trials: list[Trial] = field(default_factory=list)
    reused: int = 0

    def run(self) -> Result:
        """Everything, in order. Raises TuningError where nothing can be chosen."""
        setup = self.setup
        settings = options.baseline_settings(setup.manifest, setup.config, setup.work.record.concurrency)
        baseline = self._trial("baseline", settings, lambda _: ("baseline", "what the changes are measured against"))
        if baseline.figures is None:
            hint = f"edgert doctor {quote(str(setup.path))}"
            raise TuningError(f"the baseline failed: {baseline.reason}", hint=hint)
        winners = [baseline]
        for step in (*options.MECHANISMS, *options.REFINEMENTS):
            self._step(step, winners)
        points = self._draft_curve(winners[-1])
        curve = make_curve(points, setup.threshold)
        vocabulary = make_vocabulary(points, curve, setup.manifest, setup.threshold)
        chosen, soak = self._soak(winners) if setup.soak_s else (winners[-1], None)
        final = chosen.settings if soak is None else soak.settings
        assert chosen.figures is not None
        return Result(
            format_version=FORMAT_VERSION,
            kind="result",
            artifact=setup.artifact,
            device=setup.device,
            versions=setup.versions,
            workload=setup.work.record,
            settings=final,
            baseline=baseline.number,
            trial=chosen.number,
            steps=tuple(trial.number for trial in self.trials),
            figures=chosen.figures,
            largest_chunk=setup.config.graph_bucket_sizes[-1],
            curve=curve,
            draft_vocabulary=vocabulary,
            soak=None if soak is None else soak.number,
            notes=tuple(self._notes(soak)),
            at=self.at(),
        )

    def _notes(self, soak: Trial | None) -> list[str]:
        setup, notes = self.setup, []
        if setup.work.record.prompts == "built-in" and setup.manifest.draft_length:
            notes.append("acceptance is of built-in prompts: give a file of your own prompts as --traffic for yours")
        if soak is None:
            notes.append("no soak was run: drift of latency and memory is unknown")
        digests = {trial.outputs_sha256 for trial in self.trials if trial.step != "draft_curve" and trial.figures}
        if len(digests) > 1:
            notes.append("output ids differ between trials: expected in half precision, not in float32")
        hot = [trial for trial in self.trials if any(text.startswith(THROTTLED) for text in trial.warnings)]
        if hot:
            numbers = ", ".join(str(trial.number) for trial in hot)
            notes.append(f"the hardware throttled in trials {numbers}: their figures are of a hot device")
        return notes

    # --- steps ---

    def _step(self, step: Step, winners: list[Trial]) -> None:
        """Try what this step may change; a winner is appended to `winners`."""
        setup, start = self.setup, winners[-1]
        found = options.candidates(step, start.settings, setup.manifest, setup.config, setup.work.record.concurrency)
        if found.reason:
            self._not_applicable(step, start, found.key, None, found.reason)
            return
        goal = options.goal(step, start.settings, slo=setup.slo)
        for value in found.values:
            best = winners[-1]
            settings = {**best.settings, found.key: value}
            refusal = self._refusal(settings)
            if refusal is not None:
                self._not_applicable(step, best, found.key, value, refusal)
                continue
            verdict = self._confirmed(step, goal, best, start, found.keep)
            trial = self._trial(step, settings, verdict, changed=found.key, against=best)
            if trial.verdict == "wins" or (found.keep and trial.verdict == "no gain"):
                winners.append(trial)
            elif trial.verdict == "loses" and found.stop:
                return

    def _confirmed(self, step: Step, goal: Goal, before: Trial, start: Trial, keep: bool) -> Judge:
        """A judge that measures `before` once more where the verdict decides: the device may have changed meanwhile."""

        def verdict(after: Samples) -> tuple[Verdict, str]:
            word, reason = judge(goal, before.samples, after, start.samples)
            if word != "wins" and not (keep and word == "loses"):
                return word, reason
            why = f"trial {before.number} once more, after a change that {word}"
            again = self._trial(step, before.settings, lambda _: ("measured", why), against=before)
            self.trials.remove(again)  # it stands in the logbook; a run that is continued may not need it again
            if again.figures is None:
                return word, reason
            second, _ = judge(goal, again.samples, after, again.samples if start is before else start.samples)
            if second == word:
                return word, f"{reason}; so too beside trial {again.number}"
            return "no gain", f"{reason}, but not beside trial {again.number}: the device itself has changed"

        return verdict

    def _draft_curve(self, best: Trial) -> list[Trial]:
        """k = 0.. one request at a time, always exactly as many drafts as asked for."""
        manifest = self.setup.manifest
        if not manifest.draft_length:
            return []
        points = []
        for length in range(min(options.MOST_CURVE_DRAFTS, manifest.draft_length) + 1):
            settings = {**best.settings, "enable_mtp": length > 0, "mtp_num_heads": length or manifest.draft_length}
            trial = self._trial(
                "draft_curve",
                settings,
                lambda _: ("measured", "one request at a time, draft length fixed"),
                changed="mtp_num_heads",
                draft_length=length,
            )
            if trial.figures is not None:
                points.append(trial)
        return points

    def _soak(self, winners: Sequence[Trial]) -> tuple[Trial, Trial]:
        """The last winner that holds steady, and its soak; raises TuningError where none does.

        An earlier winner soaks with `adaptive` as it came out in the end.
        """
        refused: list[str] = []
        tried: list[Settings] = []
        for winner in reversed(winners):
            settings = {**winner.settings, "adaptive": winners[-1].settings["adaptive"]}
            if settings in tried:
                continue
            tried.append(settings)
            trial = self._trial("soak", settings, lambda _: ("steady", ""), against=winner, soak=True)
            if trial.verdict == "steady":
                return winner, trial
            refused.append(f"trial {winner.number} {trial.verdict}: {trial.reason}")
            self.stages.note(f"refused: {trial.reason}")
        raise TuningError(
            f"no settings held steady over {self.setup.soak_s / 60:g} minutes: {refused[0]}",
            hint="see the logbook; cool the device, close other programs, or raise limits.max_drift_fraction",
        )

    def _refusal(self, settings: Settings) -> str | None:
        """Why the artifact cannot run with these settings, or None."""
        try:
            load_config(self.setup.path, self.setup.manifest, settings)
        except ConfigError as error:
            return str(error)
        return None

    # --- one trial ---

    def _trial(
        self,
        step: Step,
        settings: Settings,
        verdict: Judge,
        *,
        changed: str | None = None,
        against: Trial | None = None,
        draft_length: int | None = None,
        soak: bool = False,
    ) -> Trial:
        """Measure, or take from the logbook."""
        setup = self.setup
        title = options.TITLES[step] + ("" if soak else _change(changed, against, settings, draft_length))
        reused = self._found(step, settings, against, draft_length)
        if reused is not None:
            self.stages.note(f"{title}: trial {reused.number} of the logbook ({reused.verdict})")
            self.trials.append(reused)
            self.reused += 1
            return reused
        curve = step == "draft_curve"
        requests = setup.work.curve if curve else setup.work.requests
        job = self._job(settings, requests, curve=curve, soak=soak, want_tokens=curve and not draft_length)
        before, power_mode = self.look()
        start = self.now()
        failure: str | None = None
        result: dict[str, Any] | None = None
        try:
            with self.stages.stage(title) as report:
                result = self.runner(job, report)
        except TrialFailed as error:
            failure = str(error)
        duration_s = self.now() - start
        after, _ = self.look()
        fields: dict[str, Any] = {
            **self._fields(step, settings, changed, against),
            "power_mode": power_mode,
            "conditions_before": before,
            "conditions_after": after,
            "draft_length": draft_length,
            "duration_s": duration_s,
        }
        if result is None:
            fields |= {"verdict": "failed", "reason": failure}
        else:
            fields |= found_in(result, requests, curve=curve)
            if result["soak"] is not None:
                drift = drift_of(result["soak"]["samples"], result["soak"]["seconds"], setup.drift_limit)
                steady, reason = verdict_of(drift)
                fields |= {"drift": drift, "verdict": "steady" if steady else "drifts", "reason": reason}
            else:
                word, reason = verdict(samples_of(result))
                fields |= {"verdict": word, "reason": reason}
        return self._written(Trial.model_validate(fields))

    def _not_applicable(self, step: Step, against: Trial, key: str, value: Setting | None, reason: str) -> None:
        settings = against.settings if value is None else {**against.settings, key: value}
        for known in reversed(self.known):
            if (known.step, known.verdict, known.reason) == (step, "not applicable", reason) and (
                known.against == against.number
            ):
                self.trials.append(known)
                return
        fields = self._fields(step, settings, key, against) | {"verdict": "not applicable", "reason": reason}
        trial = self._written(Trial.model_validate({**fields, "duration_s": 0.0}))
        self.stages.note(f"{options.TITLES[step]}: {trial.verdict}: {reason}")

    def _found(self, step: Step, settings: Settings, against: Trial | None, draft_length: int | None) -> Trial | None:
        """The latest line that says what this trial would; a soak must have been as long, and under the same limit."""
        number = None if against is None else against.number
        for trial in reversed(self.known):
            if (trial.step, trial.against, trial.draft_length) != (step, number, draft_length):
                continue
            if trial.settings != dict(settings) or trial.verdict in ("not applicable", "failed"):
                continue
            drift = trial.drift
            if (
                step == "soak"
                and drift
                and (drift.seconds < self.setup.soak_s or drift.limit != self.setup.drift_limit)
            ):
                continue
            return trial
        return None

    def _job(
        self, settings: Settings, requests: Sequence[BenchRequest], *, curve: bool, soak: bool, want_tokens: bool
    ) -> dict[str, Any]:
        setup = self.setup
        overrides = json.loads(json.dumps(dict(settings)))
        if not soak:  # what the device can do; with costs.json in the artifact admission would leave a share of it free
            overrides["throughput_headroom_fraction"] = 0.0
        return {
            "artifact": str(setup.path),
            "overrides": overrides,
            "requests": as_job(requests),
            "concurrency": 1 if curve else setup.work.record.concurrency,
            "repeats": setup.work.record.repeats,
            "fixed_drafts": curve,
            "slo_ttft_ms": setup.slo_ttft_ms,
            "slo_tpot_ms": setup.slo_tpot_ms,
            "want_tokens": want_tokens,
            "soak_s": setup.soak_s if soak else None,
        }

    def _fields(self, step: Step, settings: Settings, changed: str | None, against: Trial | None) -> dict[str, Any]:
        """What every trial says, measured or not."""
        setup = self.setup
        return {
            "format_version": FORMAT_VERSION,
            "kind": "trial",
            "number": self.last_number + 1,
            "step": step,
            "changed": changed,
            "before": against.settings[changed] if against is not None and changed is not None else None,
            "after": settings[changed] if changed is not None else None,
            "against": None if against is None else against.number,
            "settings": dict(settings),
            "artifact": setup.artifact,
            "device": setup.device,
            "versions": setup.versions,
            "workload": setup.work.record,
            "at": self.at(),
        }

    def _written(self, trial: Trial) -> Trial:
        """Into the logbook, and the verdict on the screen."""
        trial = trial.model_copy(update={"number": self.last_number + 1})  # another may have been written meanwhile
        self.append(trial)
        self.last_number = trial.number
        self.trials.append(trial)
        if trial.verdict not in ("not applicable", "measured", "baseline"):
            self.stages.note(f"{trial.verdict}: {trial.reason}")
        return trial


def _change(changed: str | None, against: Trial | None, settings: Settings, draft_length: int | None) -> str:
    if draft_length is not None:
        return f": {draft_length} drafts"
    if changed is None:
        return "" if against is None else ": as before, once more"
    after = show_setting(settings[changed])
    return f": {after}" if against is None else f": {show_setting(against.settings[changed])} → {after}"


def show_setting(value: Setting | None) -> str:
    """A value for people: on and off, lists without brackets."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "-" if value is None else str(value)
