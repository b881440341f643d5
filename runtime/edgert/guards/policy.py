"""What a reading means for admission: how many slots may be active, and whether anything new may start. Pure.

    state, change = next_thermal(rules, state, now_s, temperature_c)
    refusal = memory_refusal(available, total, margin_fraction, next_bytes)

Neither knows a sensor, a slot table or a log. A limit applies to admission only: what runs is never stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Level = Literal["normal", "soft", "hard", "blind"]


@dataclass(frozen=True)
class ThermalRules:
    """soft_c, hard_c: None = no such limit. All times in seconds.

    hysteresis_c   a limit that was passed is left again this far below it, so that noise changes nothing
    step_down_s    at least this long between two slots taken away: the die answers to a step within seconds
    step_up_s      at least this long between two slots given back: longer, because the heat sink answers in minutes and
                   a slot given back too early is taken away again
    blind_after_s  without a reading for this long is blind: one EAGAIN is not
    """

    slots: int
    soft_c: float | None
    hard_c: float | None
    hysteresis_c: float = 3.0
    step_down_s: float = 10.0
    step_up_s: float = 30.0
    blind_after_s: float = 10.0

    def __post_init__(self) -> None:
        if self.soft_c is not None and self.hard_c is not None and self.hard_c <= self.soft_c:
            raise ValueError(f"hard limit {self.hard_c:g} °C is not above the soft limit {self.soft_c:g} °C")

    @property
    def limited(self) -> bool:
        return self.soft_c is not None or self.hard_c is not None

    @property
    def blind_slots(self) -> int:
        """Half of the slots, rounded up: what is left where limits exist and no temperature can be read.

        As at the soft limit, but not down to one: no reading is no proof of heat, and the hardware still throttles by
        itself. Prefill goes on: refusing it would turn a broken sensor into an outage.
        """
        return (self.slots + 1) // 2


@dataclass(frozen=True)
class ThermalState:
    """slots: that may be active. prefill: whether a new request may start. changed_s: of the latest change.

    polled_s, readable_s  when the policy was last asked, and last had a temperature
    """

    slots: int
    prefill: bool
    level: Level
    changed_s: float
    polled_s: float
    readable_s: float


@dataclass(frozen=True)
class Change:
    """One change of what is allowed, with the reading that caused it: what goes into the log."""

    before: ThermalState
    after: ThermalState
    temperature_c: float | None
    reason: str


def first_state(rules: ThermalRules, now_s: float) -> ThermalState:
    """Everything allowed until the first reading, which is taken at once: blind from the start is blind at once."""
    return ThermalState(rules.slots, True, "normal", float("-inf"), now_s, float("-inf"))


def next_thermal(
    rules: ThermalRules, state: ThermalState, now_s: float, temperature_c: float | None
) -> tuple[ThermalState, Change | None]:
    """The state after one reading; None for the change where what is allowed stays as it was.

    At the hard limit nothing new starts and one slot is left; hysteresis below it admission opens again, with that one.
    At the soft limit and above one slot goes each step_down_s; hysteresis below it one comes back each step_up_s. In
    between nothing changes. After a pause in polling longer than step_up_s (nothing ran) a cool device starts whole.
    """
    if not rules.limited:
        return replace(state, polled_s=now_s), None
    paused = now_s - state.polled_s > rules.step_up_s
    state = replace(state, polled_s=now_s, readable_s=state.readable_s if temperature_c is None else now_s)
    if temperature_c is None:
        return _blind(rules, state, now_s)
    waited = now_s - state.changed_s
    if rules.hard_c is not None and temperature_c >= rules.hard_c:
        reason = f"at or above the hard limit of {rules.hard_c:g} °C"
        return _changed(state, now_s, temperature_c, 1, False, "hard", reason)
    if not state.prefill and rules.hard_c is not None and temperature_c > rules.hard_c - rules.hysteresis_c:
        return state, None
    if not state.prefill:
        reason = f"{rules.hysteresis_c:g} °C below the hard limit"
        return _changed(state, now_s, temperature_c, 1, True, "soft", reason)
    if rules.soft_c is not None and temperature_c >= rules.soft_c:
        if state.slots > 1 and waited >= rules.step_down_s:
            reason = f"at or above the soft limit of {rules.soft_c:g} °C"
            return _changed(state, now_s, temperature_c, state.slots - 1, True, "soft", reason)
        return replace(state, level="soft"), None
    cool_c = (rules.soft_c if rules.soft_c is not None else rules.hard_c or 0.0) - rules.hysteresis_c
    if temperature_c > cool_c:
        return replace(state, level="soft" if state.slots < rules.slots else "normal"), None
    if state.slots == rules.slots:
        return replace(state, level="normal"), None
    if paused or waited >= rules.step_up_s:
        slots = rules.slots if paused else state.slots + 1
        level: Level = "normal" if slots == rules.slots else "soft"
        return _changed(state, now_s, temperature_c, slots, True, level, f"cooled to {cool_c:g} °C or less")
    return state, None


def _blind(rules: ThermalRules, state: ThermalState, now_s: float) -> tuple[ThermalState, Change | None]:
    """No reading: half of the slots at most. A device that was at its hard limit stays shut for step_up_s."""
    if now_s - state.readable_s < rules.blind_after_s:
        return state, None
    if not state.prefill and now_s - state.changed_s < rules.step_up_s:
        return state, None
    slots = min(state.slots, rules.blind_slots)
    reason = f"no temperature for {rules.blind_after_s:g} s: unknown counts as the soft limit"
    return _changed(state, now_s, None, slots, True, "blind", reason)


def _changed(
    state: ThermalState, now_s: float, temperature_c: float | None, slots: int, prefill: bool, level: Level, reason: str
) -> tuple[ThermalState, Change | None]:
    if (slots, prefill, level == "blind") == (state.slots, state.prefill, state.level == "blind"):
        return replace(state, level=level), None
    after = replace(state, slots=slots, prefill=prefill, level=level, changed_s=now_s)
    return after, Change(state, after, temperature_c, reason)


def memory_refusal(
    available_bytes: int | None, total_bytes: int | None, margin_fraction: float, next_bytes: int = 0
) -> str | None:
    """Why one more sequence must wait, or None. next_bytes: what it may touch that nobody touched before.

    Unknown memory refuses nothing: there is nothing to compare.
    """
    if available_bytes is None or total_bytes is None:
        return None
    margin = int(total_bytes * margin_fraction)
    if available_bytes - next_bytes >= margin:
        return None
    more = f" and a sequence takes up to {next_bytes / 1e6:,.0f} MB" if next_bytes else ""
    return (
        f"{available_bytes / 1e6:,.0f} MB of memory are available{more}, "
        f"{margin / 1e6:,.0f} MB ({margin_fraction:.0%}) are left to the system"
    )


def power_mode_warning(expected: str | None, actual: str | None) -> str | None:
    """The sentence for a device that is not in the mode the artifact was planned for. Unknown warns of nothing."""
    if expected is None or actual is None or expected.casefold() == actual.casefold():
        return None
    return f"the device is in power mode {actual}, the artifact was planned for {expected}: speeds differ from the plan"
