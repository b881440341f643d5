"""`edgebuild train-mtp`: trains an MTP head for a model that came without one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgebuild.commands.numbers import FiniteRange


@click.command("train-mtp")
@click.option("--model", type=click.Path(path_type=Path), required=True, help="Checkpoint: folder or GGUF file.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="The head, a .safetensors file.")
@click.option("--prompts", "prompt_file", type=click.Path(path_type=Path), help="One prompt a line; else built in.")
@click.option("--minutes", type=FiniteRange(min=0.05), default=10.0, show_default=True, help="Time for all of it.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--per-task", type=click.IntRange(min=8), default=3000, show_default=True, help="Prompts a task.")
@click.option("--batch", type=click.IntRange(min=1), default=64, show_default=True, help="Sequences a step.")
@click.option("--max-tokens", type=click.IntRange(min=16), default=224, show_default=True, help="Longest answer.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--from", "head", type=click.Path(path_type=Path), help="A head for this model to go on from.")
@click.option("--resume", is_flag=True, help="Go on from OUTPUT.state.")
@click.option("--report", type=click.Path(path_type=Path), help="Write settings, losses and acceptance as JSON.")
def train_mtp(
    model: Path,
    output: Path,
    prompt_file: Path | None,
    minutes: float,
    device: str,
    per_task: int,
    batch: int,
    max_tokens: int,
    seed: int,
    head: Path | None,
    resume: bool,
    report: Path | None,
) -> None:
    """Freeze a model, let it write text, and train a module that guesses what comes next.

    Writes the head, its card beside it (.md), and while it runs a state file that --resume takes up.
    """
    import torch

    from edgebuild.checkpoint import open_checkpoint
    from edgebuild.drafter import find_drafter, load_mtp, write_sidecar
    from edgebuild.models.config import ModelConfig
    from edgebuild.train.card import card_text, describe
    from edgebuild.train.progress import Settings
    from edgebuild.train.prompts import built_in, openings, read_prompts, split_own
    from edgebuild.train.trainer import train

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoint = open_checkpoint(model)
    beginnings = []
    if prompt_file is None:
        prompts = built_in("train", per_task, seed=seed)
        beginnings = openings(3 * per_task, seed=seed)
        held = max(4, min(60, per_task // 10))
        held_out = {"held_out": built_in("held_out", held, seed=seed), "new_kinds": built_in("new", held, seed=seed)}
    else:
        prompts, kept = split_own(read_prompts(prompt_file), seed=seed)
        held_out = {"held_out": kept}
    start, drafter = None, None
    if head is not None:
        config = ModelConfig.from_hf(checkpoint.config)
        drafter = find_drafter(checkpoint, config, head)
        start = None if drafter is None else load_mtp(drafter, config, torch.float32).state_dict()
    settings = Settings(minutes=minutes, batch=batch, max_tokens=max_tokens, seed=seed)
    output.parent.mkdir(parents=True, exist_ok=True)
    trained = train(
        checkpoint,
        prompts,
        held_out,
        settings,
        device=torch.device(device),
        openings=beginnings,
        start=start,
        state_path=output.with_name(output.name + ".state"),
        resume=resume,
        log=lambda line: click.echo(line, err=True),
    )
    card = describe(trained, checkpoint, device, drafter)
    size = write_sidecar(output, trained.mtp, trained.draft_tokens, card)
    output.with_suffix(".md").write_text(card_text(output.name, card, size), encoding="utf-8")
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps({**card, "head_bytes": size, "log": trained.progress.log}, indent=2) + "\n")
    click.echo(f"{output}  {size / 1e6:.1f} MB")
    for name, tasks in card["acceptance"].items():
        for task, entry in tasks.items():
            rates = " / ".join(f"{rate:.2f}" for rate in entry["acceptance"])
            click.echo(f"{name:10} {task:12} {rates}   mean accepted length {entry['mean_accepted_length']:.2f}")
