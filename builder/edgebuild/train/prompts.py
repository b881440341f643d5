"""Built-in prompts by task, made from templates and fillings, and prompts read from a file.

Three sets that share nothing they should not: training prompts; held-out prompts, of the same kinds but about things
that no training prompt names; new prompts, of kinds that no training prompt has.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from edgebuild.errors import TrafficError
from edgebuild.train.templates import FILLINGS, TEMPLATES

TASKS = ("chat", "code", "json", "story", "extraction")
Part = Literal["train", "held_out", "new"]
_HELD_OUT_EVERY = 7  # of each list of fillings, every seventh is named by held-out prompts only
_NEW_TEMPLATES = 2  # of each task, the last two kinds of prompt are never trained on


@dataclass(frozen=True)
class Prompt:
    """A user message and the task it stands for."""

    task: str
    text: str


def built_in(part: Part, per_task: int, *, seed: int = 0) -> list[Prompt]:
    """At most `per_task` different prompts for each task (fewer where there are no more), in a fixed random order."""
    rng = random.Random(f"{seed}/{part}")
    prompts: list[Prompt] = []
    for task in TASKS:
        templates = TEMPLATES[task][-_NEW_TEMPLATES:] if part == "new" else TEMPLATES[task][:-_NEW_TEMPLATES]
        found: dict[str, None] = {}
        for _ in range(per_task * 8):
            found.setdefault(_fill(rng.choice(templates), part, rng))
            if len(found) == per_task:
                break
        prompts += [Prompt(task, text) for text in found]
    rng.shuffle(prompts)
    return prompts


def openings(per_task: int, *, seed: int = 0) -> list[Prompt]:
    """Beginnings of training prompts, cut where something would be filled in: for the model to go on with."""
    rng = random.Random(f"{seed}/openings")
    found: list[Prompt] = []
    for task in TASKS:
        templates = [template for template in TEMPLATES[task][:-_NEW_TEMPLATES] if template.rfind("{") > 0]
        for _ in range(per_task):
            template = rng.choice(templates)
            places = [place for place, letter in enumerate(template) if letter == "{" and place]
            found.append(Prompt(task, _fill(template[: rng.choice(places)], "train", rng).rstrip()))
    rng.shuffle(found)
    return found


def names_held_out(text: str) -> bool:
    """Whether a text names, in any case, something that only held-out prompts may name."""
    return _held_out_names().search(text) is not None


@cache
def _held_out_names() -> re.Pattern[str]:
    held = {entry.lower() for name in FILLINGS for entry in _entries(name, "held_out")}
    shared = {entry.lower() for name in FILLINGS for entry in _entries(name, "train")}
    return re.compile(r"\b(?:" + "|".join(re.escape(entry) for entry in sorted(held - shared)) + r")\b", re.IGNORECASE)


def read_prompts(path: Path) -> list[Prompt]:
    """One prompt a line: plain text, or JSON with `prompt` (or `text`) and perhaps `task`. Raises TrafficError."""
    prompts: list[Prompt] = []
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrafficError(f"{path}: cannot be read: {error}", hint="one prompt a line, UTF-8") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry: object = line.strip()
        if line.lstrip().startswith("{"):
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise TrafficError(f"{path}:{number}: not JSON: {error}") from None
        if isinstance(entry, dict):
            text = entry.get("prompt", entry.get("text"))
            if not isinstance(text, str) or not text.strip():
                raise TrafficError(f"{path}:{number}: no prompt", hint='expected {"prompt": "...", "task": "..."}')
            prompts.append(Prompt(str(entry.get("task", "own")), text))
        else:
            prompts.append(Prompt("own", str(entry)))
    if len(prompts) < 2:
        raise TrafficError(f"{path}: {len(prompts)} prompts", hint="at least 2: some are held out")
    return prompts


def split_own(prompts: Sequence[Prompt], *, seed: int = 0) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts of a user's own file: nine tenths to train on, the rest (at least one) held out. No text is in both."""
    different = list(dict.fromkeys(prompts))
    random.Random(seed).shuffle(different)
    held = max(1, len(different) // 10)
    return different[held:], different[:held]


def _fill(template: str, part: Part, rng: random.Random) -> str:
    """`{name}` becomes one entry of that list; the same name twice in a template takes two different entries."""
    text = template
    taken: list[str] = []
    while "{" in text:
        before, _, rest = text.partition("{")
        name, _, after = rest.partition("}")
        entries = [entry for entry in _entries(name, part) if entry not in taken]
        taken.append(rng.choice(entries))
        text = before + taken[-1] + after
    return text


def _entries(name: str, part: Part) -> list[str]:
    """The fillings that this part may name. Short lists (sizes, styles) are shared by all parts."""
    every = FILLINGS[name]
    if len(every) < 3 * _HELD_OUT_EVERY:
        return list(every)
    if part == "train":
        return [entry for index, entry in enumerate(every) if (index + 1) % _HELD_OUT_EVERY]
    return [entry for index, entry in enumerate(every) if not (index + 1) % _HELD_OUT_EVERY]
