"""The plan's promise on real traffic: a tenth of the prefill rows is padding at most, less than the usual lists."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from edgebuild.profile.loader import bundled_traffic

SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 100000.0,
}  # fmt: skip


def azure_csv() -> Path:
    """The trace of Azure/AzurePublicDataset, where it lies: EDGEBUILD_AZURE_CSV, else beside the checkout."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data" / "traffic" / "azure_llm_2023_conv.csv"
    path = Path(os.environ.get("EDGEBUILD_AZURE_CSV") or beside)
    if not path.is_file():
        pytest.skip("the Azure trace is not here; EDGEBUILD_AZURE_CSV names a copy of AzureLLMInferenceTrace_conv.csv")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a config.json: a plan needs no weights."""
    folder = tmp_path_factory.mktemp("config only")
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    return folder


def planned(profile: str, model: Path, traffic: Path) -> Any:
    ran = run(["edgebuild", "plan", "--profile", profile, "--model", model, "--traffic", traffic, "--max-cells", "11",
               "--json"])  # fmt: skip
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


@pytest.mark.parametrize("source", ["trace", "bundled histogram"])
@pytest.mark.parametrize("profile", ["cpu", "rtx"])
def test_at_most_a_tenth_is_padding_with_eleven_cells(profile: str, source: str, model: Path) -> None:
    plan = planned(profile, model, azure_csv() if source == "trace" else bundled_traffic())
    assert len(plan["prefill"]["cells"]) + len(plan["decode"]["cells"]) <= 11
    ours = plan["prefill"]["expected_padding_fraction"]
    assert ours <= 0.10
    for name in ("powers_of_two", "uniform"):
        alternative = plan["prefill"]["alternatives"][name]
        assert ours < alternative["expected_padding_fraction"]
        assert len(alternative["chunk_sizes"]) <= len(plan["prefill"]["chunk_sizes"])  # at the same count


def test_the_bundled_histogram_is_the_trace(model: Path) -> None:
    """Planned from the rows and from the histogram that ships: the same decisions."""
    from_trace, from_histogram = (planned("cpu", model, path) for path in (azure_csv(), bundled_traffic()))
    for key in ("prefill", "decode", "memory", "slots", "context_tokens"):
        assert from_trace[key] == from_histogram[key]
