"""Membership inference (LiRA, `distill.membership`) against what nodes send: their virtual images.

``python -m benchmarks.virtual_privacy --data-root DIR --out DIR [--shadows 10] [--targets 3]``

MNIST, three nodes with a class each. For each model, a random half of 600 images of a class is
distilled, and the other half held back: to 30 virtual images with 4 bits a pixel, which take the
bytes of 10 with 8 bits not packed, and to those 10. The attacker knows all of distilling but the
seed, and sees the images as they arrive. It scores a real image by the confidence of LeNet trained
on them, or by its distance to the nearest small virtual image of its class. Each model is a file
in ``--out``: a run that was stopped goes on.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cli.judge import LENET, trained
from distill import VirtualData, distill_dm
from distill.formation import Formation
from distill.membership import (
    Flags,
    Floats,
    auc,
    balanced_halves,
    logit_confidence,
    membership_scores,
    true_positives_at,
)
from distill.privacy import nearest
from task.datasets import DataSpec, Samples, load_dataset

CLASSES = (3, 5, 8)
IMAGES_A_CLASS = 600
JUDGE_STEPS = 500
FALSE_POSITIVES = 0.01
RESAMPLES = 300
VARIANTS = {"30 images, 4 bits": (30, 4), "10 images, 8 bits": (10, 8)}
"""Virtual images of a class, and bits of a pixel."""

ATTACKS = ("trained network", "nearest image")


def candidates(data_root: Path) -> tuple[Samples, DataSpec]:
    """The images whose membership is guessed, sorted by class."""
    data = load_dataset("mnist", data_root)
    train = data.train.to_samples(data.spec)
    chosen = [(train.labels == c).nonzero()[:IMAGES_A_CLASS, 0] for c in CLASSES]
    return train.subset(torch.cat(chosen)), data.spec


def parcels(
    samples: Samples, spec: DataSpec, members: Flags, variant: str, seed: int
) -> list[VirtualData]:
    """What arrives from a node of each class, with its privacy card."""
    (per_class, bits), inside = VARIANTS[variant], torch.from_numpy(members)
    arrived = []
    for label in CLASSES:
        of_class = samples.labels == label
        own = samples.subset((of_class & inside).nonzero()[:, 0])
        virtual = distill_dm(
            own.inputs,
            own.labels,
            num_classes=spec.num_classes,
            per_class=per_class,
            formation=0,
            generator=torch.Generator().manual_seed(spec.num_classes * seed + label),
        )
        virtual = virtual.with_card(own.inputs, samples.inputs[of_class & ~inside])
        arrived.append(VirtualData.from_bytes(virtual.to_bytes(bits)))
    return arrived


def observed(samples: Samples, spec: DataSpec, arrived: list[VirtualData], seed: int) -> Floats:
    """What each attack sees of each candidate, (attacks, n)."""
    decoded = [virtual.decoded() for virtual in arrived]
    pool = Samples(torch.cat([v.images for v in decoded]), torch.cat([v.labels for v in decoded]))
    model = trained(replace(LENET, steps=JUDGE_STEPS), pool, spec, seed=seed).eval()
    with torch.inference_mode():
        logits = model(samples.inputs).double().numpy()
    closeness: list[Tensor] = []
    for label, virtual, small in zip(CLASSES, arrived, decoded, strict=True):
        own = samples.inputs[samples.labels == label]
        coarse = Formation.of(virtual.formation, own.shape).coarse(own)
        closeness.append(-nearest(coarse, small.images)[0])
    return np.stack(
        [
            logit_confidence(logits, samples.labels.numpy()),
            torch.cat(closeness).double().numpy(),
        ]
    )


def interval(statistic: Callable[[Flags, Floats], float], members: Flags, scores: Floats) -> Floats:
    """Value and 95 % interval, by drawing candidates (targets, n) anew with all their scores."""
    generator = np.random.default_rng(0)

    def mean(places: slice | Any) -> float:
        pairs = zip(members[:, places], scores[:, places], strict=True)
        return float(np.mean([statistic(*pair) for pair in pairs]))

    n = members.shape[1]
    drawn = [mean(generator.integers(0, n, n)) for _ in range(RESAMPLES)]
    return np.array([mean(slice(None)), *np.quantile(drawn, (0.025, 0.975))])


def main() -> None:
    """Distil, attack and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for a file of each model")
    parser.add_argument("--shadows", type=int, default=10)
    parser.add_argument("--targets", type=int, default=3)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    samples, spec = candidates(arguments.data_root)
    generator = np.random.default_rng(0)
    shadowed = balanced_halves(arguments.shadows, len(samples), generator)
    attacked = generator.random((arguments.targets, len(samples))) < 0.5
    halves = np.concatenate([shadowed, attacked])
    table = Table("virtual images", "attack", "ROC AUC", "found at 1 % accused", "nearer to own")
    for variant in VARIANTS:
        seen, nearer = [], []
        for seed, members in enumerate(halves):
            file = arguments.out / f"{variant.replace(' ', '-')}-{seed}.npz"
            if not file.exists():
                with console.status(f"{variant}: model {seed + 1} of {len(halves)}"):
                    arrived = parcels(samples, spec, members, variant, seed)
                    cards = [virtual.card for virtual in arrived]
                    shares = [c.yardstick.nearer_to_own for c in cards if c and c.yardstick]
                    np.savez(file, seen=observed(samples, spec, arrived, seed), nearer=shares)
            with np.load(file) as saved:
                seen.append(saved["seen"])
                nearer.append(saved["nearer"].mean())
        share = f"{np.mean(nearer):.3f} +- {np.std(nearer) / np.sqrt(len(nearer)):.3f}"
        by_attack = np.stack(seen, axis=1)  # (attacks, models, n)
        for attack, own in zip(ATTACKS, by_attack, strict=True):
            shadows, targets = own[: arguments.shadows], own[arguments.shadows :]
            scores = np.stack([membership_scores(one, shadows, shadowed) for one in targets])
            cells = [
                "{:.3f} ({:.3f} to {:.3f})".format(*interval(statistic, attacked, scores))
                for statistic in (auc, found)
            ]
            table.add_row(variant, attack, *cells, share)
    console.print(table)


def found(members: Flags, scores: Floats) -> float:
    """Share of members found where 1 % of others are accused."""
    return true_positives_at(FALSE_POSITIVES, members, scores)


if __name__ == "__main__":
    main()
