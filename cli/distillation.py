"""The work of `flwr-distill distill`: load, distil, judge, write."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cli import judge
from cli.source import Source, load_source
from distill import DistillError, VirtualData, distiller
from distill.contact_sheet import contact_sheet
from distill.privacy import PrivacyCard, Yardstick
from distill.registry import Progress as Report
from protocol.hfldd import Distillation
from task.datasets import DatasetError, Samples
from task.models import ModelError
from task.settings import SettingsError

REFUSALS = (DatasetError, DistillError, ModelError, SettingsError, OSError)
"""What is wrong with what was asked; the message says it all."""


@dataclass(frozen=True)
class Asked:
    """The command line; each field is an option of `flwr-distill distill`."""

    source: str
    method: str
    per_class: int
    steps: int | None
    start: str
    allow_real_start: bool
    seed: int
    device: str
    data_root: Path | None
    shape: str | None
    output: Path


def condense(asked: Asked, console: Console) -> None:
    """Distil, judge, and write ``virtual.safetensors``, ``virtual.png`` and ``summary.json``.

    Raises
    ------
    DatasetError, DistillError, ModelError, SettingsError, OSError
        If it cannot be done as asked.
    """
    permission = {"start": asked.start, "allow-real-start": asked.allow_real_start}
    Distillation.checked(permission, "command line")
    method, device = distiller(asked.method), _device(asked.device)
    source = load_source(
        asked.source, data_root=asked.data_root, shape=asked.shape, seed=asked.seed
    )
    asked.output.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    with _progress_bar(asked.method, console) as report:
        virtual = method(
            source.train.inputs,
            source.train.labels,
            num_classes=source.spec.num_classes,
            per_class=asked.per_class,
            init=asked.start,
            steps=asked.steps,
            generator=torch.Generator().manual_seed(asked.seed),
            device=device,
            progress=report,
        )
    seconds = time.perf_counter() - begin
    virtual = virtual.with_card(source.train.inputs, source.held_back.inputs)
    packed = virtual.to_bytes()
    (asked.output / "virtual.safetensors").write_bytes(packed)
    contact_sheet(virtual.images, virtual.labels, source.class_names).save(
        asked.output / "virtual.png"
    )
    scores = _scores(VirtualData.from_bytes(packed), source, asked, device, console)
    summary = {
        **asdict(asked),
        "data_root": str(asked.data_root or ""),
        "output": str(asked.output),
        "device": str(device),
        "method": virtual.method,
        "steps": virtual.steps,
        "seconds": seconds,
        "bytes": len(packed),
        "shape": source.spec.shape,
        "class_names": source.class_names,
        "train_images": len(source.train),
        "held_back_images": len(source.held_back),
        "judge_steps": judge.STEPS,
        "scores": scores,
        "card": asdict(virtual.card) if virtual.card else None,
    }
    (asked.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    console.print(
        f"{virtual.method}: {len(virtual)} virtual images in {virtual.steps} steps, "
        f"{seconds:.1f} s, {len(packed):,} bytes"
    )
    console.print(_score_table(scores, source))
    if virtual.card is not None:
        console.print(_card_table(virtual.card))
        if virtual.card.yardstick is not None:
            console.print(_nearer(virtual.card.yardstick))
    console.print(f"Written to {asked.output}: virtual.safetensors, virtual.png, summary.json")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DistillError(f"device={name} is unknown; take auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DistillError(f"device={name}, but no CUDA device is there; take cpu")
    return device


@contextmanager
def _progress_bar(title: str, console: Console) -> Iterator[Report]:
    """Show a bar with the loss; yields what a distiller reports to."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, TextColumn("loss {task.fields[loss]}"), TimeRemainingColumn(), console=console
    ) as bar:
        task = bar.add_task(title, total=None, loss="-")
        yield lambda step, steps, loss: bar.update(
            task, completed=step, total=steps, loss=f"{loss:.4g}"
        )


def _scores(
    virtual: VirtualData, source: Source, asked: Asked, device: torch.device, console: Console
) -> dict[str, dict[str, Any]]:
    """Size of each training set and accuracy of the network trained on it."""
    targets = virtual.labels if virtual.soft_labels is None else virtual.soft_labels
    sets = {
        "virtual images": Samples(virtual.images, targets),
        "real images, as many": _real_subset(source.train, asked.per_class, asked.seed),
        "all real images": source.train,
    }
    scores = {}
    for name, samples in sets.items():
        with console.status(f"training on {name} ..."):
            accuracy = judge.train_and_score(
                samples,
                source.held_back,
                source.spec,
                steps=judge.STEPS,
                seed=asked.seed,
                device=device,
            )
        scores[name] = {"images": len(samples), "accuracy": accuracy}
    return scores


def _real_subset(samples: Samples, per_class: int, seed: int) -> Samples:
    """Random real images, `per_class` of each class or all where there are fewer."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    labels = samples.labels[order]
    return samples.subset(torch.cat([order[labels == c][:per_class] for c in torch.unique(labels)]))


def _score_table(scores: dict[str, dict[str, Any]], source: Source) -> Table:
    table = Table(title=f"Accuracy on {len(source.held_back)} held-back images")
    table.add_column(f"{judge.STEPS} steps of training on")
    table.add_column("images", justify="right")
    table.add_column("accuracy", justify="right")
    for name, score in scores.items():
        table.add_row(name, str(score["images"]), f"{score['accuracy']:.1%}")
    return table


def _card_table(card: PrivacyCard) -> Table:
    table = Table(
        title="Privacy card",
        caption="A copy has distance 0 (root mean square over normalised pixels) and cosine 1.",
    )
    table.add_column("virtual images beside")
    for name in ("least distance", "median", "highest cosine", "median"):
        table.add_column(name, justify="right")
    yardstick = card.yardstick
    rows = {
        "nearest of their own": card.own,
        "nearest held back": yardstick.held_back if yardstick else None,
        "their start": card.start,
    }
    for name, closeness in rows.items():
        if closeness is not None:
            table.add_row(name, *(f"{value:.2f}" for value in asdict(closeness).values()))
    return table


def _nearer(yardstick: Yardstick) -> str:
    return (
        f"{yardstick.nearer_to_own:.0%} of the virtual images lie nearer to one of their own than "
        f"to any held back; {yardstick.by_chance:.0%} would by chance."
    )
