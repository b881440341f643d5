"""What a trained head says of itself: as data inside its file, and as a page beside it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from edgebuild import __version__
from edgebuild.checkpoint import Checkpoint
from edgebuild.drafter import DrafterWeights
from edgebuild.train.trainer import Trained, table_of


def describe(
    trained: Trained, checkpoint: Checkpoint, device: str, before: DrafterWeights | None = None
) -> dict[str, Any]:
    """Model, device, versions, settings, amounts and acceptance of a run. No path, no date.

    before: the head that the run went on from, of which the card keeps what its own card says of its training.
    """
    progress = trained.progress
    earlier: dict[str, Any] = {}
    if before is not None:
        kept = {key: before.card[key] for key in ("answers", "answer_tokens", "steps", "seconds") if key in before.card}
        earlier = {"went_on_from": {"sha256": before.files[0].sha256(), **kept}}
    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    return {
        "model_files": [{"file": file.name, "sha256": file.sha256()} for file in checkpoint.files],
        "device": name,
        "versions": {"edgebuild": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "settings": asdict(progress.settings),
        "prompts": len({sample.ids[: sample.start] for sample in progress.samples}),
        "answers": len(progress.samples),
        "answer_tokens": sum(len(sample.ids) - sample.start for sample in progress.samples),
        "steps": progress.step,
        "seconds": {"generation": round(progress.generated_s, 1), "training": round(progress.trained_s, 1)},
        "draft_length": progress.settings.recipe.depth,
        "acceptance": table_of(trained.acceptance),
        **earlier,
    }


def card_text(file_name: str, card: Mapping[str, Any], size: int) -> str:
    """The card as Markdown."""
    seconds, settings = card["seconds"], card["settings"]
    models = ", ".join(f"`{entry['file']}` (SHA-256 {entry['sha256'][:16]}…)" for entry in card["model_files"])
    lines = [
        f"# {file_name}",
        "",
        f"A multi-token-prediction head for {models}: norms, `fc`, one decoder layer, final norm; the head and the "
        f"embedding are the model's. {size / 1e6:.1f} MB in float16.",
        "",
        f"Trained by `edgebuild train-mtp` {card['versions']['edgebuild']} on {card['device']} "
        f"(torch {card['versions']['torch']}): the model, frozen, wrote {card['answers']:,} answers "
        f"({card['answer_tokens']:,} tokens) to {card['prompts']:,} prompts (built-in or given ones, and its own) at "
        f"temperatures {', '.join(str(t) for t in settings['temperatures'])} in {seconds['generation']:.0f} s; then "
        f"{card['steps']:,} steps of {settings['batch']} sequences in {seconds['training']:.0f} s, a chain of "
        f"{settings['recipe']['depth']} unrolled, against the model's own distribution.",
        *_earlier(card),
        "",
        f"Greedy acceptance at draft length {card['draft_length']}, each position given the one before; mean accepted "
        "length with the bonus token. `held_out`: kinds of prompts that were trained on, about other things; "
        "`new_kinds`: kinds never trained on.",
        "",
        "| prompts | task | acceptance by position | mean accepted length | steps |",
        "|---|---|---|---|---|",
    ]
    for name, tasks in card["acceptance"].items():
        for task, entry in tasks.items():
            rates = " / ".join(f"{rate:.2f}" for rate in entry["acceptance"])
            lines.append(f"| {name} | {task} | {rates} | {entry['mean_accepted_length']:.2f} | {entry['steps']:,} |")
        mean = sum(entry["mean_accepted_length"] for entry in tasks.values()) / len(tasks)
        lines.append(f"| {name} | mean | | {mean:.2f} | |")
    return "\n".join(lines) + "\n"


def _earlier(card: Mapping[str, Any]) -> list[str]:
    before = card.get("went_on_from")
    if not isinstance(before, dict) or "steps" not in before:
        return []
    seconds = before["seconds"]
    return [
        f"It went on from a head (SHA-256 {before['sha256'][:16]}…) of {before['steps']:,} steps, "
        f"{before['answers']:,} answers and {seconds['generation'] + seconds['training']:.0f} s."
    ]
