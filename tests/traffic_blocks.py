"""A trace read in small blocks against the same read whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgebuild.traffic import read_traffic, source


def assert_block_ends_do_not_matter(path: Path, size: int) -> None:
    """size: bytes of a block, at least the file's first line."""
    whole = read_traffic(path)
    first = path.read_bytes().split(b"\n")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "BLOCK_BYTES", max(size, len(first) + 1))
        cut = read_traffic(path)
    assert cut == whole
    assert cut.first_skipped == whole.first_skipped
