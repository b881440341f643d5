"""The chosen settings as a scheduler.yaml: the artifact's own file with the tuned values, and who says so, in it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from edgert.config import parse_config
from edgert.manifest import Manifest

from edgebuild.artifact import canonical_json
from edgebuild.errors import OutputError
from edgebuild.files import write_whole
from edgebuild.tune.candidates import TUNED_KEYS, Settings, current_settings


def tuned_text(text: str, manifest: Manifest, settings: Settings, why: Mapping[str, str]) -> str:
    """A scheduler.yaml with `settings`; a changed key's comment says what measured it. Checked as a load does.

    why: key → reason. Raises ConfigError where the artifact cannot do it.
    """
    before = current_settings(parse_config(text, manifest))
    for key, value in settings.items():
        if before[key] != value:
            text = _replace(text, key, value, f"tuned: {why.get(key, 'measured')}; before: {_yaml(before[key])}")
    parse_config(text, manifest)
    return text


def rest_sha256(text: str) -> str:
    """Hash of what tuning leaves alone in a scheduler.yaml: two files that differ in tuned values alone agree in it."""
    document = yaml.safe_load(text)["runtime"]
    return hashlib.sha256(canonical_json({k: v for k, v in document.items() if k not in TUNED_KEYS})).hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """The whole file or the old one, in a folder that is made where it is missing. Raises OutputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}", hint="give --output FILE") from None


def _yaml(value: object) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _replace(text: str, key: str, value: object, comment: str) -> str:
    """Swap one value, and the comment lines right above its key."""
    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    runtime = root.value[0][1]
    found = [(name, node) for name, node in runtime.value if name.value == key]
    if not found:  # an artifact older than the key
        first = runtime.value[0][0].start_mark.index
        indent = text[text.rfind("\n", 0, first) + 1 : first]
        return f"{text[:first]}{key}: {_yaml(value)}  # {comment}\n{indent}{text[first:]}"
    name, node = found[0]
    start = name.start_mark.index
    line = text.rfind("\n", 0, start) + 1
    indent = text[line:start]
    above = re.search(r"(?:^[ \t]*#[^\n]*\n)*\Z", text[:line], re.MULTILINE)
    cut = above.start() if above and above.group() and runtime.value[0][0] is not name else line
    new = f"{key}: {_yaml(value)}"
    return f"{text[:cut]}{indent}# {comment}\n{indent}{new}{text[node.end_mark.index :]}"
