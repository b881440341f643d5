"""How many sequences may be admitted so that a share of the throughput stays free, and what that costs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgert.config import RuntimeConfig
from edgert.tempo import Rules


@dataclass(frozen=True)
class Headroom:
    """slots: sequences that admission lets run at once. tokens_per_s: decode throughput with so many, and with all."""

    slots: int
    of_slots: int
    tokens_per_s: float | None = None
    all_tokens_per_s: float | None = None

    def describe(self, fraction: float, source: str) -> str:
        """One sentence for people. source: of the costs."""
        if self.tokens_per_s is None or self.all_tokens_per_s is None:
            return f"headroom {fraction:.0%}: no step costs are known, all {self.of_slots} slots are admitted"
        if self.slots == self.of_slots:
            return f"headroom {fraction:.0%}: all {self.of_slots} slots are admitted"
        return (
            f"headroom {fraction:.0%}: {self.slots} of {self.of_slots} slots are admitted, "
            f"{self.tokens_per_s:,.1f} instead of {self.all_tokens_per_s:,.1f} tokens/s ({source})"
        )


def headroom_of(rules: Rules, config: RuntimeConfig) -> Headroom:
    """Sequences at once that leave the configuration's share of the measured throughput free."""
    return slots_within(rules, config.slots, config.throughput_headroom_fraction)


def slots_within(rules: Rules, slots: int, fraction: float, length: int = 0) -> Headroom:
    """The sequences that `admitted` lets run, by the costs of the decode cells.

    length: positions of a sequence, for the tier; 0 = the smallest. Without costs every slot is admitted.
    """
    rates = []
    for streams in range(1, slots + 1):
        step_ms = rules.decode_ms(streams, max(1, length))
        if step_ms is None:
            return Headroom(slots, slots)
        rates.append(min(streams, rules.batches[-1]) / step_ms * 1e3)
    chosen = admitted(rates, fraction)
    return Headroom(chosen, slots, rates[chosen - 1], rates[-1])


def admitted(rates: Sequence[float], fraction: float) -> int:
    """The most sequences whose throughput leaves `fraction` of the best free; half of the slots at least.

    rates: throughput of 1, 2, ... sequences, in any unit. Half: where a batch hardly gains anything, few sequences
    reach almost all of the throughput, and taking more slots away would only make requests wait.
    """
    slots = len(rates)
    if fraction == 0:
        return slots
    fitting = [streams for streams, rate in enumerate(rates, 1) if rate <= (1 - fraction) * max(rates)]
    return max(fitting[-1] if fitting else 1, (slots + 1) // 2)
