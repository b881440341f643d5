"""A trial's process: its result, its one line of error, its time limit, its death. Stand-ins for the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from edgebuild.tune.runner import TrialFailed, run_process

JOB = {"artifact": "x"}
StandIn = Callable[[str], None]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Makes `script` what is run in place of `python -m edgert.trial`."""

    def make(script: str) -> None:
        path = tmp_path / "trial"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return make


def test_progress_and_result_come_through(stand_in: StandIn) -> None:
    stand_in("""read job; echo '{"progress": [1, 4]}'; echo '{"progress": [4, 4]}'; echo "{\\"result\\": $job}" """)
    told: list[float] = []
    assert run_process(JOB, told.append) == JOB
    assert told == [0.25, 1.0]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("read job; echo 'some warning' >&2; echo 'plan.bin: not there' >&2; exit 3", "plan.bin: not there"),
        ("read job; exit 5", "the trial ended with status 5"),
        ("exit 5", "the trial ended with status 5"),  # it never read its job
        ("read job; kill -9 $$", "signal 9 (killed: out of memory?)"),
        ("read job; echo 'lost the device' >&2; kill -11 $$", "signal 11: lost the device"),
        ("read job; echo hello", "something that is not its own"),
        ("""read job; echo '{"result": {}}'; echo 'late' >&2; exit 4""", "late"),
        ("read job", "the trial ended with status 0"),
    ],
)
def test_whatever_goes_wrong_is_one_line(stand_in: StandIn, script: str, words: str) -> None:
    stand_in(script)
    with pytest.raises(TrialFailed) as caught:
        run_process(JOB, lambda _: None)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trial_that_takes_too_long_is_ended(stand_in: StandIn) -> None:
    stand_in("read job; exec sleep 600")
    with pytest.raises(TrialFailed, match=r"not done after 0.2 s"):
        run_process(JOB, lambda _: None, timeout_s=0.2)


def test_an_interrupt_ends_the_trial_too(stand_in: StandIn) -> None:
    stand_in("""read job; echo '{"progress": [1, 2]}'; exec sleep 600""")

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_process(JOB, interrupt)


def test_the_real_trial_names_what_is_wrong_with_the_artifact(tmp_path: Path) -> None:
    job = {
        "artifact": str(tmp_path / "none"), "overrides": {}, "concurrency": 1, "repeats": 1, "fixed_drafts": False,
        "requests": [{"prompt_ids": [1], "output_tokens": 1, "task": None, "ignore_eos": True}], "soak_s": None,
        "slo_ttft_ms": None, "slo_tpot_ms": None, "want_tokens": False,
    }  # fmt: skip
    with pytest.raises(TrialFailed, match="no such"):
        run_process(job, lambda _: None)
