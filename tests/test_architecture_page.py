"""docs/architecture.md says where things live: all modules and packages stand there, and what it names exists."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


def named(folder: str) -> set[str]:
    """What the table headed by `folder` names, without its own prefix."""
    page = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.split(f"| `{folder}/` |")[1].split("\n\n")[0]
    first = [row.split("|")[1] for row in table.splitlines()[2:]]
    return {name.rstrip("/") for column in first for name in re.findall(r"`([^`]+)`", column)}


def present(folder: str) -> set[str]:
    """Modules and packages right inside `folder`."""
    entries = (REPOSITORY / folder).iterdir()
    packages = {path.name for path in entries if (path / "__init__.py").is_file()}
    return packages | {path.name for path in (REPOSITORY / folder).glob("*.py")} - {"__init__.py"}


@pytest.mark.parametrize("folder", ["builder/edgebuild", "runtime/edgert"])
def test_every_module_and_package_is_in_the_table(folder: str) -> None:
    names = named(folder)
    assert {each for each in present(folder) if not any(fnmatch.fnmatch(each, name) for name in names)} == set()


@pytest.mark.parametrize("folder", ["builder/edgebuild", "runtime/edgert"])
def test_what_the_table_names_exists(folder: str) -> None:
    places = (REPOSITORY / folder, REPOSITORY)
    assert {name for name in named(folder) if not any(any(place.glob(name)) for place in places)} == set()
