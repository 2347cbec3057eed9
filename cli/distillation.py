"""The work of `flwr-distill distill` and `audit`."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flwr_distill.base.text import counted
from flwr_distill.cli.distill_options import AuditOptions, DistillOptions, SharedOptions
from flwr_distill.cli.judge import Judge, judges, train_and_score, training_seconds
from flwr_distill.cli.source import Source, load_source
from flwr_distill.distill import DistillError, VirtualData, distiller
from flwr_distill.distill.audit import (
    Finding,
    Setting,
    attack,
    distilled_halves,
    findings,
    reconstruction,
    strongest,
)
from flwr_distill.distill.audited import audited
from flwr_distill.distill.auto import resolved
from flwr_distill.distill.contact_sheet import contact_sheet
from flwr_distill.distill.forecast import forecast
from flwr_distill.distill.membership import FEW, FEWER, Interval
from flwr_distill.distill.own_network import network_arguments
from flwr_distill.distill.privacy import PrivacyCard
from flwr_distill.distill.registry import Progress as Report
from flwr_distill.distill.registry import caution_of, formation_arguments
from flwr_distill.server.page.words import data_size
from flwr_distill.strategies.hfldd.requests import Distillation
from flwr_distill.task.datasets import DatasetError, Samples
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import ModelError

VIRTUAL = "virtual images"
REFUSALS = (DatasetError, DistillError, ModelError, SettingsError, OSError)
"""Errors in the user's input, shown without a traceback."""


def load(options: SharedOptions) -> Source:
    """The images; an unknown method is an error before they are loaded."""
    distiller(options.method)
    return load_source(
        options.source, data_root=options.data_root, shape=options.shape, seed=options.seed
    )


def seeded(options: SharedOptions) -> torch.Generator:
    """A new generator with the seed."""
    return torch.Generator().manual_seed(options.seed)


def condense(options: DistillOptions, console: Console) -> None:
    """Distil, judge, and write ``virtual.safetensors``, ``virtual.png`` and ``summary.json``."""
    permission = {"start": options.start, "allow-real-start": options.allow_real_start}
    Distillation.checked(permission, "command line")
    device = _device(options.device)
    source = load(options)
    options.output.mkdir(parents=True, exist_ok=True)
    method = resolved(
        options.method, source.train.inputs, source.train.labels, source.spec.num_classes
    )
    arguments = {
        "num_classes": source.spec.num_classes,
        "per_class": options.per_class,
        "init": options.start,
        "steps": options.steps,
        "device": device,
        **formation_arguments(method, options.formation),
        **network_arguments(method, options.network, options.weights, device),
    }
    real = source.train.inputs, source.train.labels
    panel = judges(options.judge, source.spec)
    expected = forecast(method, *real, generator=seeded(options), **arguments)
    judging = [3 * training_seconds(judge, source.train, source.spec, device) for judge in panel]
    of_each = ", ".join(
        f"{judge.name} {duration(seconds)}" for judge, seconds in zip(panel, judging, strict=True)
    )
    console.print(
        f"{method} will take about {duration(expected.seconds)} and {data_size(expected.memory)} "
        f"of memory; then judging three training sets {duration(sum(judging))} ({of_each})"
    )
    begin = time.perf_counter()
    with progress_bar(method, console) as report:
        virtual = distiller(method)(*real, generator=seeded(options), progress=report, **arguments)
    seconds = time.perf_counter() - begin
    virtual = virtual.with_card(source.train.inputs, source.held_back.inputs)
    packed = virtual.to_bytes(options.bits)
    (options.output / "virtual.safetensors").write_bytes(virtual.to_safetensors(options.bits))
    sheet = contact_sheet(virtual.images, virtual.labels, source.class_names, virtual.formation)
    sheet.save(options.output / "virtual.png")
    scores = _scores(VirtualData.from_bytes(packed), source, panel, options, device, console)
    summary = {
        **asdict(options),
        "data_root": str(options.data_root or ""),
        "output": str(options.output),
        "device": str(device),
        "method": virtual.method,
        "formation": virtual.formation,
        "steps": virtual.steps,
        "seconds": seconds,
        "bytes": len(packed),
        "shape": source.spec.shape,
        "class_names": source.class_names,
        "train_images": len(source.train),
        "held_back_images": len(source.held_back),
        "judges": {judge.name: {"model": judge.model, "steps": judge.steps} for judge in panel},
        "scores": scores,
        "card": asdict(virtual.card) if virtual.card else None,
    }
    (options.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    tiles = f" of {virtual.formation} x {virtual.formation} smaller ones"
    tiles = tiles if virtual.formation > 1 else ""
    console.print(
        f"{virtual.method}: {counted(len(virtual), 'virtual image')}{tiles} in "
        f"{counted(virtual.steps, 'step')}, "
        f"{seconds:.1f} s, {len(packed):,} bytes"
    )
    console.print(_score_table(scores, panel, source))
    if virtual.card is not None:
        console.print(_card_table(virtual.card))
        if (yardstick := virtual.card.yardstick) is not None:
            console.print(
                f"{yardstick.nearer_to_own:.0%} of the virtual images are nearer to a source image "
                f"than to any held-back one; {yardstick.by_chance:.0%} would be by chance."
            )
    if audit := audited(virtual, source.train.labels):
        console.print(f"{'Caution: by' if audit.alarming else 'By'} the audit, {audit}.")
    if warning := caution_of(virtual.method):
        console.print(f"Caution: {warning}.")
    console.print(f"Written to {options.output}: virtual.safetensors, virtual.png, summary.json")


def duration(seconds: float) -> timedelta:
    """Whole seconds, at least one."""
    return timedelta(seconds=max(1, round(seconds)))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        use = "use auto, cpu, cuda or cuda:N"
        raise SettingsError("is unknown", where="device", value=name, remedy=use) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        problem = "this machine has no CUDA device"
        raise SettingsError(problem, where="device", value=name, remedy="use cpu")
    return device


@contextmanager
def progress_bar(title: str, console: Console) -> Iterator[Report]:
    """Show a progress bar with the loss; yields the callback that updates it."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, TextColumn("loss {task.fields[loss]}"), TimeRemainingColumn(), console=console
    ) as bar:
        task = bar.add_task(title, total=None, loss="-")
        yield lambda step, steps, loss: bar.update(
            task, completed=step, total=steps, loss=f"{loss:.4g}"
        )


def _scores(
    virtual: VirtualData,
    source: Source,
    panel: tuple[Judge, ...],
    options: DistillOptions,
    device: torch.device,
    console: Console,
) -> dict[str, dict[str, Any]]:
    """Size of each training set, and accuracy of each judge's network trained on it."""
    decoded = virtual.decoded()
    targets = decoded.labels if decoded.soft_labels is None else decoded.soft_labels
    sets = {
        VIRTUAL: Samples(decoded.images, targets),
        "real images, as many": at_most(source.train, options.per_class, options.seed),
        "all real images": source.train,
    }
    scores = {}
    for name, samples in sets.items():
        accuracy = {}
        for judge in panel:
            with progress_bar(f"{judge.name}, {name}", console) as report:
                accuracy[judge.name] = train_and_score(
                    judge,
                    samples,
                    source.held_back,
                    source.spec,
                    seed=options.seed,
                    device=device,
                    progress=report,
                )
        images = len(virtual) if name == VIRTUAL else len(samples)
        scores[name] = {"images": images, "accuracy": accuracy}
    return scores


def at_most(samples: Samples, per_class: int, seed: int) -> Samples:
    """Random samples: `per_class` of each class, or all if there are fewer."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    labels = samples.labels[order]
    return samples.subset(torch.cat([order[labels == c][:per_class] for c in torch.unique(labels)]))


def _score_table(
    scores: dict[str, dict[str, Any]], panel: tuple[Judge, ...], source: Source
) -> Table:
    table = Table(title=f"Accuracy on {len(source.held_back)} held-back images")
    table.add_column("trained on")
    table.add_column("images", justify="right")
    for judge in panel:
        table.add_column(f"{judge.name}, {judge.steps} steps", justify="right")
    for name, score in scores.items():
        cells = (f"{accuracy:.1%}" for accuracy in score["accuracy"].values())
        table.add_row(name, str(score["images"]), *cells)
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
        "nearest source image": card.own,
        "nearest held-back image": yardstick.held_back if yardstick else None,
        "their start": card.start,
    }
    for name, closeness in rows.items():
        if closeness is not None:
            table.add_row(name, *(f"{value:.2f}" for value in asdict(closeness).values()))
    return table


def report_attacks(options: AuditOptions, console: Console) -> None:
    """Attack the virtual data of a source, and print a table and what it means."""
    logging.getLogger("distill").setLevel(logging.ERROR)  # it warns for each set
    source = load(options)
    samples = at_most(source.train, options.most, options.seed)
    images, labels = samples.inputs, samples.labels
    method = resolved(options.method, images, labels, source.spec.num_classes)
    formation = formation_arguments(method, options.formation).get("formation", 1)
    setting = Setting(method, options.start, options.per_class, formation, options.steps)
    of_one = forecast(
        method,
        images[::2],
        labels[::2],
        device=images.device,
        num_classes=source.spec.num_classes,
        per_class=options.per_class,
        init=options.start,
        steps=options.steps,
        generator=seeded(options),
        **formation_arguments(method, options.formation),
    )
    console.print(
        f"{method} will take at most about {duration(options.sets * of_one.seconds)} for "
        f"{options.sets} halves"
    )
    with progress_bar(f"{method}, {options.sets} halves", console) as update:
        halves = distilled_halves(
            images,
            labels,
            setting,
            num_classes=source.spec.num_classes,
            sets=options.sets,
            canaries=options.canaries,
            seed=options.seed,
            progress=update,
        )
    with progress_bar("attacks", console) as update:
        attacked = attack(
            halves, num_classes=source.spec.num_classes, seed=options.seed, progress=update
        )
    attacks = findings(attacked, options.seed)
    console.print(_attack_table(attacks))
    most = strongest(attacks)
    console.print(
        f"{counted(len(images), 'image')} in halves, {options.sets} of these distilled by {method} "
        f"from {options.start}, {options.per_class} virtual images of a class."
    )
    console.print(
        f"Of 100 distilled images the strongest attack ({most.attack}) finds "
        f"{100 * most.curve.at_1pct.value:.1f}, while it accuses 1 of 100 others falsely; a guess "
        "finds 1."
    )
    for kind, share in most.worst.items():
        console.print(
            f"Images that are {kind}: {_share(share)} are found at {FEWER:.1%} falsely accused."
        )
    nearer = reconstruction(attacked)
    console.print(
        f"Of 100 virtual images, {100 * nearer.pixels.value:.0f} are nearer to a source image than "
        f"to any other of yours ({100 * nearer.features.value:.0f} by features); by chance "
        f"{100 * nearer.by_chance:.0f} would be."
    )


def _attack_table(attacks: list[Finding]) -> Table:
    table = Table(title="What an attacker finds (95 % interval)")
    table.add_column("attack by")
    for title in ("area under ROC curve", f"found at {FEW:.0%} accused", f"at {FEWER:.1%}"):
        table.add_column(title, justify="right")
    for one in attacks:
        table.add_row(one.attack, *map(_share, one.curve))
    table.caption = "A guess has an area of 0.5, and finds as many as it accuses."
    return table


def _share(share: Interval) -> str:
    return f"{share.value:.3f} ({share.low:.3f} to {share.high:.3f})"
