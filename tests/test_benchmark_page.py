"""docs/benchmarks.md is what benchmarks/results/*.json say, nothing more and nothing older."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
assert SPEC is not None
assert SPEC.loader is not None
RENDER = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(RENDER)


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "benchmarks.md").read_text() == RENDER.render(), "run python benchmarks/render.py"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_every_result_says_where_and_how_it_was_obtained(path: Path) -> None:
    document = json.loads(path.read_text())
    assert {"device", "versions", "commit", "command"} <= document.keys()


def test_rows_become_a_table(tmp_path: Path) -> None:
    record = {
        "what": "a test",
        "device": "d",
        "rows": [{"shape": "0.6b", "step_ms": 1.23456}, {"shape": "4b", "note": "x|y"}],
    }
    (tmp_path / "decode.json").write_text(json.dumps(record))
    page = RENDER.render(tmp_path)
    assert "| shape | step_ms | note |" in page
    assert "| 0.6b | 1.235 |  |" in page
    assert "x\\|y" in page


def test_pictures_are_up_to_date() -> None:
    drawn = RENDER.pictures()
    for name, drawing in drawn.items():
        assert (ROOT / "docs" / "pictures" / name).read_text() == drawing, "run python benchmarks/render.py"


def test_bars_become_a_picture_that_the_page_shows(tmp_path: Path) -> None:
    bars = [{"label": "opened <1>", "value": 10.0}, {"label": "decode", "value": 20.0}]
    record = {"what": "memory", "device": "d", "rows": [{"a": 1}], "picture": {"title": "MB & more", "bars": bars}}
    (tmp_path / "prefill.json").write_text(json.dumps(record))
    assert "![MB & more](pictures/prefill.svg)" in RENDER.render(tmp_path)
    drawing = RENDER.pictures(tmp_path)["prefill.svg"]
    root = ElementTree.fromstring(drawing)
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert texts == ["MB & more", "opened <1>", "10", "decode", "20"]
    widths = [float(element.attrib["width"]) for element in root.iter() if element.tag.endswith("rect")][1:]
    assert widths[1] == 2 * widths[0]
