"""YAML into plain values that remember the file, line and column of every key. Knows YAML, not profiles."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from edgert.strictjson import BAD_YAML_VALUE

from edgebuild.errors import ProfileError

Where = tuple[str | int, ...]  # ("device", "power_modes", 0)


@dataclass(frozen=True)
class Mark:
    """A place in a file; line and column count from 1."""

    file: Path
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Document:
    """One mapping and where each of its keys and values stands."""

    data: dict[str, Any]
    keys: dict[Where, Mark]
    values: dict[Where, Mark]

    def mark(self, where: Where, *, key: bool = False) -> Mark:
        """The place of a value (or of its key); of the nearest thing around it when it is not in the file."""
        for end in range(len(where), -1, -1):
            table = self.keys if key or end < len(where) else self.values
            found = table.get(where[:end]) or self.values.get(where[:end])
            if found is not None:
                return found
        raise KeyError(where)


def read_document(path: Path) -> Document:
    """Read one YAML mapping. Raises ProfileError: unreadable, not YAML, not a mapping, a key twice, an alias."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ProfileError(f"{path}: the file is empty", hint="`edgebuild profiles show cpu` prints an example")
        if not isinstance(node, yaml.MappingNode):
            raise ProfileError(f"{_mark(path, node)}: expected a mapping (key: value)")
        keys: dict[Where, Mark] = {}
        values: dict[Where, Mark] = {}
        data = _Walk(path, loader, keys, values).value(node, ())
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        place = f"{path}:{at.line + 1}:{at.column + 1}" if at else str(path)
        raise ProfileError(f"{place}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ProfileError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    finally:
        if loader is not None:
            loader.dispose()
    return Document(data, keys, values)


def _mark(path: Path, node: yaml.Node) -> Mark:
    return Mark(path, node.start_mark.line + 1, node.start_mark.column + 1)


class _Walk:
    """Builds the value of each node and writes down where it stands."""

    def __init__(self, path: Path, loader: yaml.SafeLoader, keys: dict[Where, Mark], values: dict[Where, Mark]) -> None:
        self.path, self.loader, self.keys, self.values = path, loader, keys, values
        self.seen: set[int] = set()

    def value(self, node: yaml.Node, where: Where) -> Any:
        mark = _mark(self.path, node)
        if id(node) in self.seen and not isinstance(node, yaml.ScalarNode):
            raise ProfileError(f"{mark}: YAML aliases of sections are not read here", hint="write the section out")
        self.seen.add(id(node))
        self.values[where] = mark
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, where)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*where, index)) for index, item in enumerate(node.value)]
        try:
            value: Hashable = self.loader.construct_object(node)
        except BAD_YAML_VALUE:
            kind = node.tag.rsplit(":", 1)[-1]
            raise ProfileError(f"{_mark(self.path, node)}: {node.value!r:.60} is no {kind}") from None
        return value

    def _mapping(self, node: yaml.MappingNode, where: Where) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            mark = _mark(self.path, key_node)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                raise ProfileError(f"{mark}: a key must be a plain text")
            key = key_node.value
            if key in data:
                raise ProfileError(f"{mark}: key {key!r} stands twice, first at line {self.keys[(*where, key)].line}")
            self.keys[(*where, key)] = mark
            data[key] = self.value(value_node, (*where, key))
        return data
