"""Which captured graphs exist, and what runs eagerly instead: order, budget, failures, counters.

A graph has fixed addresses, so it belongs to one cell at one first slot. Largest first: a big graph that fails for want
of memory fails before the small ones have taken it. This module knows no CUDA: capturing is a function passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from edgert.cells import Cell
from edgert.errors import BackendError

logger = logging.getLogger(__name__)


class Closable(Protocol):
    def close(self) -> None: ...


Graph = TypeVar("Graph", bound=Closable)


@dataclass(frozen=True)
class GraphKey:
    """One graph: `cell` on the slots first_slot .. first_slot + batch − 1, and what the drafter does after it.

    drafts  None: nothing; 0: it takes in the committed rows; more: it drafts as many tokens
    """

    cell: Cell
    first_slot: int
    drafts: int | None = None

    @property
    def label(self) -> str:
        return self.cell.label + ("" if self.drafts is None else f" + {self.drafts} drafts")


@dataclass(frozen=True)
class Fallback:
    """A cell that runs eagerly and why: CUDA's reason, or the budget."""

    key: GraphKey
    reason: str


def size_order(cells: Iterable[Cell]) -> list[Cell]:
    """Largest first: by token rows in one launch, then by KV tier."""
    return sorted(cells, key=lambda cell: (-cell.batch * cell.query_rows, -cell.kv_tier, cell.kind))


def graph_keys(cells: Iterable[Cell], slots: int, draft_length: int = 0) -> list[GraphKey]:
    """Every graph that steps are launched as: batch 1 at each slot, larger batches at slot 0; largest first."""
    return [
        GraphKey(cell, first, drafts)
        for cell in size_order(cells)
        for first in (range(slots) if cell.batch == 1 else range(1))
        for drafts in draft_variants(cell, draft_length)
    ]


def draft_variants(cell: Cell, draft_length: int) -> list[int | None]:
    """What the drafter may do after a step of this cell, most first.

    A chunk primes, and the last one drafts all that can be drafted (what is not asked for is dropped: once a request).
    A decode cell without room for drafts serves what does not draft; a step there that does is rare and runs eagerly.
    """
    if not draft_length:
        return [None]
    if cell.kind == "prefill":
        return [draft_length, 0, None]
    if cell.query_rows == 1:
        return [None]
    return [*range(draft_length, 0, -1), None]


class GraphPool(Generic[Graph]):
    """Captured graphs by key. `fallbacks` says what is not captured; `replays` and `eager` count launches."""

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, Graph] = {}
        self.fallbacks: list[Fallback] = []
        self.replays = 0
        self.eager = 0

    def capture(self, keys: Iterable[GraphKey], one: Callable[[GraphKey], Graph], *, limit: int | None = None) -> None:
        """Calls `one` for each key in order until `limit` graphs exist. A failure costs that key its graph, no more."""
        for key in keys:
            if limit is not None and len(self._graphs) >= limit:
                self._fall_back(key, f"the budget of {limit} graphs is spent")
                continue
            try:
                self._graphs[key] = one(key)
            except BackendError as error:
                self._fall_back(key, str(error))

    def take(self, key: GraphKey) -> Graph | None:
        """The graph to launch, or None to run eagerly; counts either."""
        graph = self._graphs.get(key)
        if graph is None:
            self.eager += 1
        else:
            self.replays += 1
        return graph

    def __len__(self) -> int:
        return len(self._graphs)

    def close(self) -> None:
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _fall_back(self, key: GraphKey, reason: str) -> None:
        self.fallbacks.append(Fallback(key, reason))
        logger.warning("%s at slot %d runs without a CUDA graph: %s", key.label, key.first_slot, reason)
