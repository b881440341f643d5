"""The tables at the end of doctor, bench and tune: numbers in, lines out."""

from __future__ import annotations

from edgert.capture import cell_states, counts
from edgert.cells import Cell
from edgert.graphs import graph_keys
from edgert.tables import acceptance_table, cells_table, memory_table, table, wrapped_table

MB = 1_000_000


def test_memory_by_phase_shows_change_share_and_the_first_phase_of_the_peak() -> None:
    phases = {"opened": 300 * MB, "warmed_up": 500 * MB, "prefill-64": 900 * MB, "decode-1": 900 * MB}
    lines = memory_table(phases, 800 * MB, baseline_bytes=100 * MB)
    assert lines == [
        "memory by phase  MB (plan 800)  change  of plan",
        "opened                     200    +200      25%",
        "warmed_up                  400    +200      50%",
        "prefill-64                 800    +400     100%  peak",
        "decode-1                   800      +0     100%",
    ]
    assert memory_table(phases)[1].split() == ["opened", "300", "+300"]
    assert memory_table({}) == []


def test_acceptance_by_task_and_position_leaves_out_what_never_drafted() -> None:
    entry = {"by_position": [0.5, None], "mean_accepted_length": 1.5, "steps": 1200}
    lines = acceptance_table({"": entry, "chat": {**entry, "steps": 0}})
    assert [line.split() for line in lines[1:]] == [["(no", "task)", "0.50", "/", "-", "1.50", "1,200"]]
    assert acceptance_table({"chat": {**entry, "steps": 0}}) == []


def test_the_cells_that_ran_most_come_first_and_the_rest_is_summed() -> None:
    lines = cells_table({f"decode-1x1@{tier}": tier for tier in range(1, 11)}, most=8)
    assert lines[1].split() == ["decode-1x1@10", "10", "18%"]
    assert lines[-1].split() == ["2", "others", "3", "5%"]
    assert cells_table({}) == []


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table(("a", "b"), [("longer", "1"), ("x", "1000")]) == ["a          b", "longer     1", "x       1000"]


def test_columns_stand_under_their_wrapped_titles() -> None:
    lines = wrapped_table(["run", "longest gap ms"], [["a long name", "1.0"], ["b", "1,000.0"]])
    assert lines == [
        "             longest",
        "                 gap",
        "run               ms",
        "-----------  -------",
        "a long name      1.0",
        "b            1,000.0",
    ]
    assert wrapped_table(["run"], []) == ["run", "---"]


def test_how_each_cell_runs_and_why() -> None:
    small, large, wide = (Cell("decode", batch, 1, 128) for batch in (1, 2, 4))
    fallbacks = [
        {"cell": small.label, "first_slot": 3, "reason": "out of memory"},
        {"cell": wide.label, "first_slot": 0, "reason": "dynamic allocation"},
    ]
    states = cell_states([small, large, wide], [small, large, wide], {"graphs": 4, "fallbacks": fallbacks}, 4)
    assert [(state.status, state.reason) for state in states] == [
        ("partly", "not at slot 3: out of memory"),
        ("captured", ""),
        ("eager", "dynamic allocation"),
    ]
    assert counts(states) == {"captured": 1, "partly": 1, "eager": 1}
    off = cell_states([small, large], [small], {"graphs": 0}, 4)
    assert [state.status for state in off] == ["eager", "unused"]
    assert off[0].reason == "enable_cuda_graph is false"
    (direct,) = cell_states([small], [small], {"backend": "onnxruntime"}, 4)
    assert (direct.status, direct.reason) == ("direct", "onnxruntime has no graphs")


def test_a_cell_has_a_graph_for_each_thing_that_the_drafter_may_do() -> None:
    cell = Cell("decode", 1, 4, 128)
    labels = [(key.label, key.first_slot) for key in graph_keys([cell], 2, 3)]
    some = [{"cell": label, "first_slot": slot, "reason": "no"} for label, slot in labels if "3 drafts" in label]
    every = [{"cell": label, "first_slot": slot, "reason": "no"} for label, slot in labels]
    (partly,) = cell_states([cell], [cell], {"graphs": 2, "fallbacks": some}, 2, 3)
    assert (partly.status, partly.reason) == ("partly", "not with 3 drafts at slots 0, 1: no")
    (eager,) = cell_states([cell], [cell], {"graphs": 0, "fallbacks": every}, 2, 3)
    assert (eager.status, eager.reason) == ("eager", "no")
