"""What virtual data give away: membership attacks on them, and accuracy with noisy means.

``python -m benchmarks.audit --out DIR [--data digits] [--data-root DIR] [--sets 257] [--classes N]
[--most N] [--budgets 1 10 50] [--only dm-class-stats-10-f1 ...] [--canaries 10] [--plot FILE.svg]
[--page FILE.html] [--json FILE]``; ``--quick`` is a small grid with fewer sets.

Each setting's virtual data (distiller, start, images of a class, formation) are a file in
``--out``: an audit that was stopped continues. A setting's halves are drawn of the same images, and
every set is attacked with all others as shadows; of each number the table has the most that an
attack finds. It also says how many virtual images are nearer to an image of their own set
than to any other, by pixels and by features in random networks. Then images under differential
privacy: the accuracy of the data set's network trained on them, and the epsilon that the best
attack on the release proves, which must not be above the claimed one.
"""

import argparse
import itertools
import logging
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure as Picture
from rich.console import Console
from sklearn.metrics import roc_curve

from benchmarks.dp import DELTA, virtual_accuracy
from benchmarks.figures import write_json
from benchmarks.shown import printed, svg_of
from flwr_distill.cli.distillation import at_most
from flwr_distill.cli.judge import QUICK, trained
from flwr_distill.client.terms import extractor
from flwr_distill.distill.audit import (
    Attacked,
    Halves,
    Setting,
    attack,
    distilled_halves,
    findings,
    names_of,
    reconstruction,
    strongest,
)
from flwr_distill.distill.augmentation import draw_augmentation
from flwr_distill.distill.distribution_matching import WIDTH, Network
from flwr_distill.distill.errors import DistillError
from flwr_distill.distill.features import RandomConvNet
from flwr_distill.distill.membership import least_epsilon
from flwr_distill.distill.private_matching import (
    BANK,
    REFERENCE,
    UnitFeatures,
    noise_for,
    with_noise,
)
from flwr_distill.server.page.layout import page
from flwr_distill.strategies.common.sections import Figure, Section, Table
from flwr_distill.task.datasets import Dataset, load_dataset

STARTS = ("class-stats", "pixel-stats", "noise", "real")
BUDGETS = (1, 10, 50)
GRID = [
    *(Setting(d, s, n) for n in BUDGETS for d in ("dm", "kip", "kip-negatives") for s in STARTS),
    *(Setting("dm", s, n, formation=2) for n in (1, 10) for s in STARTS),
    *(Setting("dm", "class-stats", n, refreshes=5) for n in (1, 10)),
]
QUICK_GRID = [
    *(Setting("dm", s, n, steps=100) for s in ("class-stats", "real") for n in (1, 10)),
    *(Setting("kip", s, n, steps=100) for s in ("class-stats", "real") for n in (1, 10)),
    *(Setting("kip-negatives", "class-stats", n, steps=100) for n in (1, 10)),
]
"""With fewer steps, so that it ends in minutes."""
QUICK_SETS, QUICK_CLASSES = 33, 3
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
CANARY_SETTINGS = list(itertools.product(EPSILONS, ("noise", "full"), (10, 100)))
"""Claimed epsilon, kind of the image in question, images of its class: 20 settings."""


def name_of(setting: Setting) -> str:
    """Short name of a setting, for files and the legend."""
    steps = "" if setting.steps is None else f"-{setting.steps}"
    shape = f"{setting.per_class}-f{setting.formation}"
    again = f"-{setting.refreshes}x" if setting.refreshes else ""
    return f"{setting.distiller}-{setting.start}-{shape}{steps}{again}"


def round_networks(data: Dataset, rounds: int) -> list[Network]:
    """Stand-ins for the global model at each refresh: ever longer trained, on held-back images."""
    held_back = data.test.to_samples(data.spec)
    judges = [replace(QUICK, steps=100 * (number + 1)) for number in range(rounds)]
    return [extractor(trained(judge, held_back, data.spec, seed=0)) for judge in judges]


def attacked(file: Path, data: Dataset, setting: Setting, options: Any) -> Attacked:
    """Attack a setting's halves of the training images of the first classes."""
    networks = round_networks(data, setting.refreshes)
    if not _is_whole(file):
        distilled = _distilled(data, setting, options, networks)
        fresh = file.with_suffix(".tmp.npz")
        np.savez_compressed(fresh, **distilled._asdict())
        fresh.replace(file)
    with np.load(file) as saved:
        read: dict[str, Any] = {name: saved[name] for name in Halves._fields}
    for name in ("images", "labels", "versions", "virtual_labels"):
        read[name] = torch.from_numpy(read[name])
    halves = Halves(**read | {"formation": int(read["formation"])})
    return attack(halves, num_classes=data.spec.num_classes, seed=0, networks=networks)


def _distilled(
    data: Dataset, setting: Setting, options: Any, networks: Sequence[Network]
) -> Halves:
    samples = data.train.to_samples(data.spec)
    chosen = samples.labels < options.classes
    own = samples.subset(chosen.nonzero()[:, 0])
    if options.most is not None:
        own = at_most(own, options.most, seed=0)
    return distilled_halves(
        own.inputs,
        own.labels,
        setting,
        num_classes=data.spec.num_classes,
        sets=options.sets,
        canaries=options.canaries,
        seed=0,
        others=samples.inputs[~chosen] if options.classes == 1 else None,
        networks=networks,
    )


def _is_whole(file: Path) -> bool:
    """Whether a file is there, and not of a version that kept something else."""
    if not file.exists():
        return False
    with np.load(file) as saved:
        return set(Halves._fields) <= set(saved.files)


def release_scores(
    epsilon: float, kind: str, count: int, trials: int, generator: torch.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The best attack on the noisy means of a class: with an image in question, and without it.

    The attacker knows all other images (noise), the networks and the count, and projects the noisy
    means on what the image adds to them: the most powerful test between two normal distributions.
    ``full`` is an image with all pixels white; the other kind is noise.
    """
    images = torch.randn(count, 1, 8, 8, generator=generator)
    if kind == "full":
        images[-1] = 3.0
    noise = noise_for(epsilon, DELTA) * BANK**0.5
    inside, outside = torch.zeros(trials), torch.zeros(trials)
    for _ in range(BANK):
        augment = draw_augmentation(8, 8, generator)
        convnet = RandomConvNet.draw(1, 8, WIDTH, generator)
        reference = augment(torch.randn(REFERENCE, 1, 8, 8, generator=generator))
        network = UnitFeatures(convnet, convnet(reference).mean(0))
        features = network(augment(images))
        own, others = features[-1], features[:-1].sum(0)
        for scores, total in ((inside, others + own), (outside, others)):
            means = (total / count).expand(trials, -1)
            released = with_noise(means, [count] * trials, noise, generator)
            scores += (released - others / count) @ own
    return inside.double().numpy(), outside.double().numpy()


def row_of(setting: Setting, own: Attacked) -> dict[str, Any]:
    """A line of the table: of each number the most that an attack finds."""
    found = strongest(findings(own))
    curve = {"auc": found.curve.auc, "tpr_at_1pct": found.curve.at_1pct}
    curve["tpr_at_01pct"] = found.curve.at_01pct
    return {
        **asdict(setting),
        "attack": found.attack,
        **{name: share.value for name, share in curve.items()},
        **{f"{name}_interval": share[1:] for name, share in curve.items()},
        "worst": {kind: tuple(share) for kind, share in found.worst.items()},
        "shadows": len(own.members) - 1,
        "nearer_to_own": reconstruction(own)._asdict(),
    }


def table_of(rows: Iterable[dict[str, Any]]) -> Table:
    """The rows for people."""
    columns = ("distiller", "start", "a class", "best attack", "AUC", "at 1 %", "at 0.1 %", "worst")
    lines = []
    for row in rows:
        worst = max(row["worst"].items(), key=lambda item: item[1][0])
        cells = [
            "{:.3f} ({:.3f} to {:.3f})".format(row[key], *row[f"{key}_interval"])
            for key in ("auc", "tpr_at_1pct", "tpr_at_01pct")
        ]
        found = "{}: {:.3f} ({:.3f} to {:.3f})".format(worst[0], *worst[1])
        lines.append([row["distiller"], row["start"], _kind(row), row["attack"], *cells, found])
    return Table(columns, lines)


def reconstruction_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Shares of virtual images that are nearer to one of their own images than to any other."""
    columns = ("distiller", "start", "a class", "#by pixels", "#by features", "#by chance")
    lines = []
    for row in rows:
        pixels, features, by_chance = row["nearer_to_own"].values()
        shown = ["{:.3f} ({:.3f} to {:.3f})".format(*share) for share in (pixels, features)]
        lines.append([row["distiller"], row["start"], _kind(row), *shown, f"{by_chance:.3f}"])
    return Table(columns, lines)


def _kind(row: dict[str, Any]) -> str:
    """Images of a class, and how they were packed and refreshed."""
    again = f", refreshed {row['refreshes']} times" if row["refreshes"] else ""
    return f"{row['per_class']}, {row['formation']} x {row['formation']}{again}"


def epsilon_table(proven: Iterable[dict[str, Any]]) -> Table:
    """Claimed epsilons, and what the best attack proves."""
    columns = ("#claimed epsilon", "image", "#of a class", "#at least")
    lines = [
        [f"{p['claimed']:g}", p["kind"], str(p["count"]), f"{p['at_least']:.2f}"] for p in proven
    ]
    return Table(columns, lines)


def picture(attacks: dict[str, Attacked]) -> Picture:
    """ROC curves of usual images on logarithmic axes, by the attack that finds most of them."""
    figure = Picture(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    for name, own in attacks.items():
        usual = own.kinds == "usual"
        place = names_of(own).index(strongest(findings(own)).attack)
        false, true, _ = roc_curve(
            own.members[:, usual].ravel(), own.scores[place][:, usual].ravel()
        )
        axes.plot(false, true, label=name, linewidth=1)
    axes.plot([1e-4, 1], [1e-4, 1], color="grey", linestyle="--", linewidth=1, label="guess")
    axes.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1))
    axes.set(xlabel="others accused", ylabel="members found")
    axes.legend(fontsize=6)
    return figure


def audit_page(
    title: str,
    attacks: dict[str, Attacked],
    tables: list[Table],
    proven: Table,
    private: Iterable[dict[str, float]],
) -> str:
    """Curves and tables as a page of HTML; `title` names the data."""
    curves = Figure(
        "Members found, by others accused",
        "Ordinary images, by the strongest attack. An attacker who accuses few others is at the "
        "left: what is high there names single images with certainty.",
        svg_of(picture(attacks)),
        wide=True,
    )
    accuracy = Table(
        ("#epsilon", "#accuracy"), [[f"{p['epsilon']:g}", f"{p['accuracy']:.3f}"] for p in private]
    )
    sections = [
        Section(
            "Virtual data",
            text=(
                "Each set of virtual images is attacked by one who has as many others, made of the "
                "same images, as the title says. Shares are of members found where 1 % and 0.1 % "
                "of the others are accused, with intervals of 95 %. The worst are images that do "
                "not belong: mislabelled, of another kind, or there twice. The second table has "
                "shares of virtual images that are nearer to an image of their own set than to any "
                "other.",
            ),
            figures=[curves],
            tables=tables,
        ),
        Section(
            "Under differential privacy",
            text=(
                "What the best attack on the noisy means proves is at least their epsilon (95 %). "
                "It must not be above what is claimed.",
            ),
            tables=[proven, accuracy],
        ),
    ]
    return page("Audit of virtual data", title, sections)


def main() -> None:
    """Audit, and write the table, the curves and the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--sets", type=int, default=257, help="one more than the shadows")
    parser.add_argument("--classes", type=int, default=10, help="the first ones of the data set")
    parser.add_argument("--most", type=int, help="images of each class, at most")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="images of a class")
    names = sorted({name_of(setting) for setting in (*GRID, *QUICK_GRID)})
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SETTING")
    parser.add_argument("--canaries", type=int, default=10, help="of each of three kinds")
    parser.add_argument("--trials", type=int, default=4000, help="of a release with noise")
    parser.add_argument("--out", type=Path, help="folder for a file of each setting")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="FILE", help="curves and tables as HTML")
    options = parser.parse_args()
    if options.quick:
        options.sets, options.classes, options.trials = QUICK_SETS, QUICK_CLASSES, 1000
    elif options.out is None:
        parser.error("--out is needed, so that an audit that was stopped can continue")
    logging.getLogger("distill").setLevel(logging.ERROR)  # of each set that starts as real images
    console = Console()
    data = load_dataset(options.data, options.data_root)
    rows, attacks = [], {}
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        whole = QUICK_GRID if options.quick else GRID
        grid = [
            setting
            for setting in whole
            if setting.per_class in options.budgets and name_of(setting) in options.only
        ]
        for number, setting in enumerate(grid, start=1):
            begin, name = time.perf_counter(), name_of(setting)
            drawn = f"{options.data}-{options.classes}-{options.sets}-{options.canaries}"
            drawn += "" if options.most is None else f"-of-{options.most}"
            try:
                attacks[name] = attacked(out / f"{drawn}-{name}.npz", data, setting, options)
            except DistillError as error:
                console.print(f"{name}: {error}")
                continue
            rows.append(row_of(setting, attacks[name]))
            took = time.perf_counter() - begin
            console.print(f"{number} of {len(grid)}: {name}, {took:.0f} s")
    table = table_of(rows)
    console.print(printed(table))
    console.print("Virtual images nearer to one of their own images than to any held back:")
    nearer = reconstruction_table(rows)
    console.print(printed(nearer))
    private = [{"epsilon": e, "accuracy": virtual_accuracy(data, e)} for e in (1.0, 10.0)]
    generator = torch.Generator().manual_seed(0)
    proven = []
    for epsilon, kind, count in CANARY_SETTINGS:
        inside, outside = release_scores(epsilon, kind, count, options.trials, generator)
        least = least_epsilon(inside, outside, DELTA)
        proven.append({"claimed": epsilon, "kind": kind, "count": count, "at_least": least})
    epsilons = epsilon_table(proven)
    console.print(printed(epsilons))
    console.print(*(f"epsilon {p['epsilon']:g}: accuracy {p['accuracy']:.3f}" for p in private))
    write_json(options.json, {"rows": rows, "dp": private, "empirical_epsilon": proven})
    if options.plot is not None:
        picture(attacks).savefig(options.plot)
    if options.page is not None:
        title = f"{options.data}, {options.classes} classes, {options.sets - 1} shadows"
        html = audit_page(title, attacks, [table, nearer], epsilons, private)
        options.page.write_text(html, encoding="utf-8")


if __name__ == "__main__":
    main()
