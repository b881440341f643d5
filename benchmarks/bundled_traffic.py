"""Makes the bundled traffics that are parts of the Azure trace: python benchmarks/bundled_traffic.py TRACE.csv

steady-chat  requests with a prompt of at most 1,024 tokens, coming one by one (burstiness 1: Poisson)
bursty-long  four short requests (at most 512 prompt tokens) to each long one (1,500 to 4,000), coming in bursts
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from edgebuild.simulate.arrivals import read_arrivals
from edgebuild.simulate.records import Arrival
from edgebuild.traffic import Histogram, dump_histogram

TARGET = Path(__file__).resolve().parent.parent / "profiles" / "traffic"
SOURCE = (
    "Derived from the Azure LLM inference trace 2023 (conversation), CC BY 4.0, github.com/Azure/AzurePublicDataset"
)


def made(name: str, what: str, chosen: list[Arrival], sha256: str, burstiness: float) -> tuple[str, str]:
    """Name and text of one file."""
    prompts, outputs = ([getattr(each, key) for each in chosen] for key in ("prompt_tokens", "output_tokens"))
    histogram = Histogram.from_lengths(prompts, outputs, name=name, source_sha256=sha256)
    shown = f"{SOURCE}. Changed: {what}."
    text = dump_histogram(replace(histogram, attribution=shown, burstiness=burstiness))
    head = (
        f"# {what}; only the counts of lengths are kept.\n# Arrivals are made up: a gamma process of "
        f"shape {burstiness:g} ({'Poisson' if burstiness == 1 else 'in bursts'}).\n"
        "# Made by benchmarks/bundled_traffic.py from the trace of azure-conv-2023.yaml.\n"
    )
    return name, head + text


def main(trace: Path) -> None:
    sha256 = hashlib.sha256(trace.read_bytes()).hexdigest()
    arrivals, _ = read_arrivals(trace)
    chat = [each for each in arrivals if each.prompt_tokens <= 1024]
    short = [each for each in arrivals if each.prompt_tokens <= 512]
    long = [each for each in arrivals if 1500 <= each.prompt_tokens <= 4000]
    count = min(len(long), len(short) // 4)
    spread = np.linspace(0, len(long) - 1, count).astype(int)
    mixed = short[: 4 * count] + [long[at] for at in spread]
    for name, text in (
        made("steady-chat", "requests with a prompt of at most 1,024 tokens", chat, sha256, 1.0),
        made(
            "bursty-long", "four requests of at most 512 prompt tokens to each of 1,500 to 4,000", mixed, sha256, 0.15
        ),
    ):
        (TARGET / f"{name}.yaml").write_text(text, encoding="utf-8")
        print(f"wrote {name}.yaml")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
