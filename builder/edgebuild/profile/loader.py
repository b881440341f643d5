"""From a path or a bundled name to a Profile: `extends`, relative paths, and errors that name the place in the file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from edgebuild.data import bundled
from edgebuild.errors import ProfileError, TrafficError
from edgebuild.profile.nodes import Document, Mark, Where, read_document
from edgebuild.profile.schema import NAME, Profile

DEFAULT_TRAFFIC = "azure-conv-2023"
_PATHS = ("model", "traffic", "drafter")


def bundled_names() -> list[str]:
    """Names of the profiles that ship with edgebuild."""
    return sorted(path.stem for path in bundled("profiles").glob("*.yaml"))


def bundled_traffic(name: str = DEFAULT_TRAFFIC) -> Path:
    """A traffic histogram that ships with edgebuild."""
    return bundled("profiles") / "traffic" / f"{name}.yaml"


def bundled_traffic_names() -> list[str]:
    """Names of the traffic histograms that ship with edgebuild."""
    return sorted(path.stem for path in (bundled("profiles") / "traffic").glob("*.yaml"))


def find_traffic(path_or_name: Path | str) -> Path:
    """The file meant: one that exists, else the bundled histogram of that name. Raises TrafficError."""
    path, name = Path(path_or_name), str(path_or_name).removesuffix(".yaml")
    if path.exists():
        return path
    if name in bundled_traffic_names():
        return bundled_traffic(name)
    raise TrafficError(
        f"{path_or_name}: neither a file nor a bundled traffic", hint=_bundled_hint(name, bundled_traffic_names())
    )


def find_profile(path_or_name: Path | str) -> Path:
    """The file meant: one that exists, else a bundled profile of that name (`orin`, or `orin.yaml` without folder)."""
    path = Path(path_or_name)
    if path.is_file():
        return path
    text = str(path_or_name)
    if len(path.parts) == 1:
        inside = bundled("profiles") / f"{text.removesuffix('.yaml')}.yaml"
        if inside.is_file():
            return inside
    raise ProfileError(f"{text}: neither a file nor a bundled profile", hint=_bundled_hint(path.stem, bundled_names()))


def _bundled_hint(name: str, names: Sequence[str]) -> str:
    """All bundled names, the nearest first."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"{f'did you mean {near[0]}? ' if near else ''}bundled: {', '.join(names)}"


def load_profile(path_or_name: Path | str) -> Profile:
    """Read, complete and check a profile. Raises ProfileError naming file, line, column and what was expected."""
    path = find_profile(path_or_name)
    document = _extended(path, ())
    try:
        return Profile.model_validate(document.data)
    except ValidationError as error:
        problems = [_describe(document, item) for item in _worth_telling(error.errors(include_url=False))]
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ProfileError("; ".join(problems[:3]) + more) from None


def _extended(path: Path, above: tuple[Path, ...]) -> Document:
    """The document with everything that it extends underneath. Without a name of its own it goes by the file's."""
    document = read_document(path)
    if path.resolve() in above:
        chain = " extends ".join(str(step) for step in (*above, path.resolve()))
        raise ProfileError(f"{document.mark(('extends',), key=True)}: profiles extend each other in a circle: {chain}")
    _resolve_paths(document, path.parent)
    parent = document.data.pop("extends", None)
    if parent is None:
        return document
    if re.fullmatch(NAME, path.stem):
        document.data.setdefault("name", path.stem)
    mark = document.mark(("extends",))
    if not isinstance(parent, str) or not parent:
        raise ProfileError(f"{mark}: extends: expected the name or path of a profile, got {parent!r}")
    beside = [path.parent / parent, path.parent / f"{parent}.yaml"]
    beside = [file for file in beside if file.is_file() and file.resolve() != path.resolve()]
    try:
        found = beside[0] if beside else find_profile(parent)
    except ProfileError as error:
        raise ProfileError(f"{mark}: extends: {error}") from None
    return _over(_extended(found, (*above, path.resolve())), document)


def _resolve_paths(document: Document, folder: Path) -> None:
    """Make file names independent of the working directory. A bundled histogram may be given by name."""
    for key in _PATHS:
        value = document.data.get(key)
        if not isinstance(value, str) or not value:
            continue
        resolved = (folder / Path(value).expanduser()).resolve()
        if key == "traffic" and not resolved.exists() and bundled_traffic(value).is_file():
            resolved = bundled_traffic(value)
        document.data[key] = str(resolved)


def _over(base: Document, top: Document) -> Document:
    """`top` laid over `base`, section by section; each key remembers the file that it came from."""

    def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
        merged = dict(below)
        for key, value in above.items():
            under = merged.get(key)
            merged[key] = merge(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
        return merged

    data = merge(base.data, top.data)
    return Document(data, base.keys | top.keys, base.values | top.values)


def _worth_telling(items: Sequence[Any]) -> list[Any]:
    """Unknown keys first; a key that is only missing because it was misspelt is not told a second time."""
    unknown = [item for item in items if item["type"] == "extra_forbidden"]
    misspelt = {(*item["loc"][:-1], _nearest_key(tuple(item["loc"]))) for item in unknown}
    others = [item for item in items if item["type"] != "extra_forbidden"]
    return unknown + [item for item in others if item["type"] != "missing" or tuple(item["loc"]) not in misspelt]


def _describe(document: Document, item: Any) -> str:
    """One pydantic error as `file:line:column: key: what is wrong`."""
    where: Where = tuple(item["loc"])
    kind, value = item["type"], item.get("input")
    if kind == "impossible":
        key = (*where, item["ctx"]["key"])
        return f"{document.mark(key)}: {_dotted(key)}: {item['ctx']['message']}"
    if kind == "extra_forbidden":
        return f"{document.mark(where, key=True)}: {_unknown_key(where)}"
    if kind == "missing":
        return f"{document.mark(where[:-1], key=True)}: {_dotted(where)} is missing"
    mark: Mark = document.mark(where)
    name = _dotted(where)
    if kind == "value_error":
        return f"{mark}: {name}: {item['ctx']['error']}"
    if kind == "literal_error":
        near = difflib.get_close_matches(str(value), _literals(item["ctx"]["expected"]), n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        return f"{mark}: {name}: {value!r}{meant}: expected {item['ctx']['expected']}"
    if kind == "model_type":
        return f"{mark}: {name}: {value!r}: expected a section (key: value)"
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{mark}: {name}: {value!r}: {message}"


def _literals(expected: str) -> list[str]:
    return [word.strip("' ") for word in expected.replace(" or ", ",").split(",")]


def _dotted(where: Where) -> str:
    return ".".join(str(part) for part in where)


def _unknown_key(where: Where) -> str:
    """Says which key is unknown, the nearest valid one in its section, or the section where it belongs."""
    wrong = str(where[-1])
    near = _nearest_key(where)
    if near:
        return f"unknown key {_dotted(where)!r}: did you mean {near!r}?"
    sections = {"": Profile, **{name: _section(Profile, name) for name in Profile.model_fields}}
    for name, section in sections.items():
        if section is not None and wrong in section.model_fields:
            return f"unknown key {_dotted(where)!r}: it belongs under {name or 'the top level'!r}"
    return f"unknown key {_dotted(where)!r}: expected one of {', '.join(_fields(where[:-1]))}"


def _nearest_key(where: Where) -> str | None:
    near = difflib.get_close_matches(str(where[-1]), _fields(where[:-1]), n=1, cutoff=0.5)
    return near[0] if near else None


def _fields(where: Where) -> list[str]:
    model: type[BaseModel] | None = Profile
    for part in where:
        model = _section(model, str(part)) if model is not None else None
    top = ["extends"] if model is Profile else []
    return [*(model.model_fields if model is not None else ()), *top]


def _section(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    field = model.model_fields.get(name)
    if field is None:
        return None
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None
