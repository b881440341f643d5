"""What a plan can say of latency and throughput before anything is measured, from the weight reads of its cost model.

Peak bandwidth, so every time here is a floor. `edgebuild simulate` says more, once cells are measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from edgert.headroom import admitted

from edgebuild.plan.cells import CostModel, Counts

LATE_SHARE = 95  # the prompt length that a first-token target is judged by, percentile


def read_ms(weight_bytes: float, bandwidth_bytes_per_s: float) -> float:
    """One read of the weights."""
    return 1e3 * weight_bytes / bandwidth_bytes_per_s


def first_token_ms(cost: CostModel, weights_ms: float, prompt: int, chunk: int, steps: int, batch: int) -> float:
    """A prompt read in chunks of `chunk` rows, with `steps` decode steps of `batch` sequences between them."""
    chunks = -(-prompt // chunk)
    prefill = sum(cost.prefill(min(chunk, prompt - at * chunk), (at + 1) * chunk) for at in range(chunks))
    return weights_ms * (prefill + (chunks - 1) * steps * cost.decode(batch, prompt))


def first_token_note(
    cost: CostModel, weights_ms: float, prompts: Counts, chunk: int, steps: int, batch: int, target_ms: float
) -> str | None:
    """Why the target for the first token cannot be kept for the longest prompts, or None where it may be.

    The largest chunk is the best for the first token, so this target never makes chunks smaller: slo.itl_ms does.
    """
    places = np.cumsum(prompts)
    if not places.size or not places[-1]:
        return None
    prompt = max(1, int(np.searchsorted(places, places[-1] * LATE_SHARE / 100)))
    alone = first_token_ms(cost, weights_ms, prompt, chunk, 0, batch)
    shared = first_token_ms(cost, weights_ms, prompt, chunk, steps, batch)
    what = f"slo.ttft_ms {target_ms:g}: a prompt of {prompt:,} tokens ({LATE_SHARE} % are no longer)"
    if alone > target_ms:
        return f"{what} takes {alone:,.0f} ms at peak bandwidth with nothing beside it; it cannot be kept for those"
    if shared > target_ms:
        return (
            f"{what} takes {alone:,.0f} ms at peak bandwidth alone and {shared:,.0f} ms in chunks of {chunk} beside "
            f"{batch} streams; it is kept only while few decode"
        )
    return None


def headroom_note(cost: CostModel, batches: Sequence[int], slots: int, length: float, fraction: float) -> str | None:
    """What keeping a share of the throughput free costs, once costs are measured; None where it costs nothing."""
    rates = []
    for streams in range(1, slots + 1):
        batch = next((size for size in batches if size >= streams), batches[-1])
        rates.append(min(streams, batch) / cost.decode(batch, length))
    held = admitted(rates, fraction)
    if held == slots:
        return None
    share = rates[held - 1] / rates[-1]
    return (
        f"headroom: with measured costs (costs.json) admission holds {held} of {slots} sequences, so that "
        f"{fraction:.0%} of the throughput stays free; decode then yields about {share:.0%} of the tokens/s"
    )
