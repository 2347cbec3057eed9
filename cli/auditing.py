"""The work of `flwr-distill audit`: load, attack, say what was found."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from flwr_distill.base.text import counted
from flwr_distill.cli.distillation import at_most, duration, progress_bar
from flwr_distill.cli.source import load_source
from flwr_distill.distill import distiller
from flwr_distill.distill.audit import (
    Finding,
    Setting,
    attack,
    distilled_halves,
    findings,
    reconstruction,
    strongest,
)
from flwr_distill.distill.auto import resolved
from flwr_distill.distill.forecast import forecast
from flwr_distill.distill.membership import FEW, FEWER, Interval
from flwr_distill.distill.registry import formation_arguments


@dataclass(frozen=True)
class Options:
    """The command line; each field is an option of `flwr-distill audit`."""

    source: str
    method: str
    per_class: int
    start: str
    formation: int
    steps: int | None
    sets: int
    most: int
    canaries: int
    seed: int
    data_root: Path | None
    shape: str | None


def report(options: Options, console: Console) -> None:
    """Attack the virtual data of a source, and print a table and what it means."""
    logging.getLogger("distill").setLevel(logging.ERROR)  # a warning of each set
    distiller(options.method)  # an unknown one is refused before anything is loaded
    source = load_source(
        options.source, data_root=options.data_root, shape=options.shape, seed=options.seed
    )
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
        generator=torch.Generator().manual_seed(options.seed),
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
    found = findings(attacked, options.seed)
    console.print(_table(found))
    most = strongest(found)
    console.print(
        f"{counted(len(images), 'image')} in halves, {options.sets} of these distilled by {method} "
        f"from {options.start}, {options.per_class} virtual images of a class."
    )
    found_of_100 = 100 * most.curve.at_1pct.value
    console.print(
        f"Of 100 images that were distilled, the strongest attack ({most.attack}) finds "
        f"{found_of_100:.1f} while it accuses 1 of 100 others falsely; a guess finds 1."
    )
    for kind, share in most.worst.items():
        console.print(
            f"Images that are {kind}: {_shown(share)} are found at {FEWER:.1%} falsely accused."
        )
    nearer = reconstruction(attacked)
    console.print(
        f"Of 100 virtual images, {100 * nearer.pixels.value:.0f} are nearer to an image that they "
        f"were made from than to any other of yours ({100 * nearer.features.value:.0f} by "
        f"features); by chance {100 * nearer.by_chance:.0f} would be."
    )


def _table(found: list[Finding]) -> Table:
    table = Table(title="What an attacker finds (95 % interval)")
    table.add_column("attack by")
    for title in ("area under ROC curve", f"found at {FEW:.0%} accused", f"at {FEWER:.1%}"):
        table.add_column(title, justify="right")
    for one in found:
        table.add_row(one.attack, *map(_shown, one.curve))
    table.caption = "A guess has an area of 0.5, and finds as many as it accuses."
    return table


def _shown(share: Interval) -> str:
    return f"{share.value:.3f} ({share.low:.3f} to {share.high:.3f})"
