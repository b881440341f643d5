"""The whole engine on the GPU with the real SmolLM2: cancels and slow readers, memory, doctor on one screen."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx", reason="the rtx extra is not installed")

from edgert import cuda
from edgert.engine import Engine
from gpu_artifact import smollm2_artifact

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
CANCELS, CHECKED = 500, 10
# one shape for each sequence whatever else runs: then its numbers are the same bit for bit
ALONE_OR_NOT = {"graph_batch_sizes": [1], "adaptive": False, "enable_mtp": False}


@pytest.fixture(scope="module")
def artifact(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2_artifact(demo_gguf, tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def engine(artifact: Path) -> Iterator[Engine]:
    with Engine.load(artifact, **ALONE_OR_NOT) as engine:
        yield engine


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 49_000) for _ in range(rng.randint(1, 700))] for _ in range(count)]


def test_500_random_cancels_and_a_slow_reader_disturb_nobody(engine: Engine) -> None:
    checked = prompts(CHECKED, 1)
    alone = [engine.complete(ids, max_tokens=48, ignore_eos=True).token_ids for ids in checked]
    slow_ids = [3, 4, 5]
    slow_alone = engine.complete(slow_ids, max_tokens=40, ignore_eos=True).token_ids
    used = cuda.free_bytes()
    rng, slow_got = random.Random(2), list[int]()

    def slow() -> None:
        for delta in engine.generate(slow_ids, max_tokens=40, ignore_eos=True):
            slow_got.extend(delta.token_ids)
            time.sleep(0.1)

    reader = threading.Thread(target=slow)
    reader.start()
    handles, waiting, everyone = [], [], []
    for number, ids in enumerate(prompts(CANCELS, 3)):
        if number % (CANCELS // CHECKED) == 0:
            handles.append(engine.submit(checked[len(handles)], max_tokens=48, ignore_eos=True))
        everyone.append(engine.submit(ids, max_tokens=64, temperature=rng.choice([0.0, 1.0]), ignore_eos=True))
        waiting.append(everyone[-1])
        time.sleep(rng.uniform(0, 0.02))
        waiting.pop(rng.randrange(len(waiting))).cancel()
        while len(waiting) > 8:
            waiting.pop(rng.randrange(len(waiting))).cancel()
    for handle in waiting:
        handle.cancel()
    reader.join()
    assert {handle.result().finish_reason for handle in everyone} <= {"cancelled", "length"}
    assert [handle.result().token_ids for handle in handles] == alone
    assert tuple(slow_got) == slow_alone
    snapshot = engine.metrics()
    assert (snapshot.state, snapshot.free_slots) == ("ready", snapshot.slots)
    assert snapshot.finished["cancelled"] > CANCELS // 2
    assert snapshot.eager_launches == 0
    assert used - cuda.free_bytes() < 16 << 20  # nothing grows with requests


def test_text_comes_out_and_sampling_keeps_to_its_seed(engine: Engine) -> None:
    answer = engine.complete(chat="What is the capital of France?", max_tokens=24)
    assert "Paris" in answer.text
    drawn = [engine.complete(chat="Name a colour.", max_tokens=16, temperature=0.9, seed=7).token_ids for _ in (0, 1)]
    assert drawn[0] == drawn[1]


def test_doctor_fits_a_screen_and_finds_nothing_wrong_with_the_engine(artifact: Path) -> None:
    command = [sys.executable, "-m", "edgert.cli", "doctor", str(artifact)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    print(ran.stdout)
    assert ran.returncode in (0, 1), ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) <= 40
    for word in ("versions", "device", "memory", "golden", "graphs", "decode"):
        assert any(word in line for line in lines), word
    assert "as fast as eager" in ran.stdout
