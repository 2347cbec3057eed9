"""What each party of a run learns of a node's images besides its virtual data: measured attacks.

``python -m benchmarks.parties [--sets 257] [--canaries 10] [--nodes 100]
[--only views classes parcels] [--json FILE]``

Digits, a node with images of three classes. Random halves of them are learned as nodes do, by the
default settings, and each is attacked with all others as shadows (LiRA). The attacker knows all
images in question, the model that the node began with, and the seed. Three things may reach it:

- the node's **model** after a round: the server of FedAvg or a sector leader of FedHEAD gets it, in
  the first round, when the global model is good already, and in each of ten rounds;
- the **mean** of it and four other nodes' models, which are held-back images': FedHEAD's server,
  and one that gets secure sums;
- **soft labels** on noise, which HFLDD's server gets.

Of a model it takes how sure it is of an image's label. Of the model's change, and of that of the
soft labels, it takes the share that each image has in it: the change is taken for a sum of those
that single images would cause, and solved for their weights.

Then it guesses of ``--nodes`` nodes with one to ten classes:

- **which classes** each has, of which it knows no image: by the share in the same changes of
  held-back images of a class;
- **how many**, by the size of a node's sealed parcel, by what that was without padding, and by the
  seconds until it leaves: as most of those have that look most alike, among the other half of the
  nodes.

What virtual data themselves show is in ``benchmarks.audit``.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.figures import write_json
from flwr_distill.cli.judge import QUICK, trained
from flwr_distill.client.training import soft_labels, train_round
from flwr_distill.distill.audit import Finding, finding
from flwr_distill.distill.many import distill_many
from flwr_distill.distill.membership import (
    Curve,
    Flags,
    Floats,
    curve,
    left_out_scores,
    logit_confidence,
    share_bounds,
)
from flwr_distill.distill.shadows import Canaries, draw_members, with_canaries
from flwr_distill.links.records import VIRTUAL_DATA
from flwr_distill.links.seal import sealed_size
from flwr_distill.strategies.hfldd.requests import Distillation, LabelRequest
from flwr_distill.task.datasets import Dataset, DataSpec, Samples, load_dataset
from flwr_distill.task.models import create_model
from flwr_distill.task.settings import TrainSettings

ATTACKS = ("views", "classes", "parcels")
CLASSES = 3
GOOD_STEPS = 300
"""Of the model that is good already, on held-back images."""
OTHERS = 4
ROUNDS = 10
KNOWN_A_CLASS = 10
"""Held-back images of a class, by whose shares it is looked for."""
IMAGES_A_CLASS = 60
RIDGE = 0.01
"""Of solving for the images' shares, in mean squared changes of single images."""
TRAIN, LABELS, DISTILLATION = TrainSettings(), LabelRequest(), Distillation()


class View(NamedTuple):
    """What a party sees of a set, one number for each image and attack (attacks, n)."""

    party: str
    sees: str
    attacks: tuple[str, ...]
    of: Callable[[Samples], Floats]


def share_solver(alone: Tensor) -> Callable[[Tensor], Floats]:
    """Ridge regression of a change (d,) on those that images alone cause, (n, d): weights (n,)."""
    wide = alone.double()
    system = wide @ wide.mT
    system.diagonal().add_(RIDGE * system.diagonal().mean())
    factor = torch.linalg.cholesky(system)

    def shares(change: Tensor) -> Floats:
        causes = (wide @ change.double())[:, None]
        weights: Floats = torch.cholesky_solve(causes, factor)[:, 0].numpy()
        return weights

    return shares


def seeded(number: int = 0) -> torch.Generator:
    """Of a node's draws in a round, which a server knows by the run's seed."""
    return torch.Generator().manual_seed(number)


def steps_alone(model: nn.Module, chosen: Canaries) -> Tensor:
    """The step that each image alone would cause, (n, weights): minus its loss's gradient."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, weights, (image[None],))
        return functional.cross_entropy(logits, label[None])

    steps = vmap(grad(loss), (None, 0, 0))(weights, chosen.images, chosen.labels)
    return -torch.cat([steps[name].flatten(1) for name in weights], dim=1)


def models_view(
    party: str,
    sees: str,
    start: nn.Module,
    chosen: Canaries,
    others: Sequence[Samples] = (),
    *,
    rounds: int = 1,
    mean: bool = False,
) -> View:
    """The models of a node after each round, or their means with those of others.

    A round begins with the mean of the one before, which is seen in any case.
    """
    first_shares = share_solver(steps_alone(start, chosen))

    def of(samples: Samples) -> Floats:
        model, shares = copy.deepcopy(start), []
        for number in range(rounds):
            shares_of = share_solver(steps_alone(model, chosen)) if number else first_shares
            before = vector_of(model)
            models = [trained_from(model, own, seeded(number)) for own in (samples, *others)]
            after = torch.stack(models).mean(0)
            seen = after if mean else models[0]
            shares.append(shares_of(seen - before))
            vector_to_parameters(after, model.parameters())
        vector_to_parameters(seen, model.parameters())
        with torch.no_grad():
            logits = model.eval()(chosen.images).double().numpy()
        sure = logit_confidence(logits, chosen.labels.numpy())
        return np.stack([sure, np.mean(shares, axis=0)])

    return View(party, sees, ("label", "change"), of)


def vector_of(model: nn.Module) -> Tensor:
    """All weights of a model."""
    return parameters_to_vector(model.parameters()).detach()


def trained_from(start: nn.Module, samples: Samples, generator: torch.Generator) -> Tensor:
    """Weights after a round of training on these samples."""
    model = copy.deepcopy(start)
    train_round(model, samples, TRAIN, generator)
    return vector_of(model)


def labels_view(start: nn.Module, chosen: Canaries, spec: DataSpec) -> View:
    """Soft labels on noise, as HFLDD's label knowledge."""
    noise = torch.randn(LABELS.auxiliary_size, *spec.shape, generator=seeded())

    @torch.no_grad()
    def predicted(weights: Tensor) -> Tensor:
        model = copy.deepcopy(start).eval()
        vector_to_parameters(weights, model.parameters())
        return functional.softmax(model(noise), dim=1).flatten()

    before = vector_of(start)
    labels = predicted(before)
    alone = [predicted(before + LABELS.initial_lr * s) - labels for s in steps_alone(start, chosen)]
    shares = share_solver(torch.stack(alone))

    def of(samples: Samples) -> Floats:
        own = soft_labels(
            copy.deepcopy(start),
            samples,
            noise,
            steps=LABELS.initial_steps,
            lr=LABELS.initial_lr,
            batch_size=LABELS.initial_batch_size,
            generator=seeded(),
        )
        return shares(own.flatten() - labels)[None]

    return View("server of HFLDD", "soft labels on noise", ("change",), of)


def strongest(view: View, chosen: Canaries, members: Flags) -> Finding:
    """What the best of a view's attacks finds."""
    sets = [Samples(chosen.images[row], chosen.labels[row]) for row in torch.from_numpy(members)]
    seen = [view.of(own) for own in track(sets, f"{view.party}: {view.sees}", transient=True)]
    scores = [left_out_scores(own, members) for own in np.stack(seen, axis=1)]
    names = [*view.attacks]
    if len(scores) > 1:
        names, scores = [*names, "both"], [*scores, np.sum(scores, axis=0)]
    generator = np.random.default_rng(0)
    found = [
        finding(name, members, own, chosen.kinds, generator)
        for name, own in zip(names, scores, strict=True)
    ]
    return max(found, key=lambda f: f.curve.auc.value)


def nodes_of(
    samples: Samples, spec: DataSpec, nodes: int
) -> Iterator[tuple[Tensor, Samples, torch.Generator]]:
    """Classes, samples and draws of nodes with 1 to all classes, equally many images of each."""
    for node in range(nodes):
        generator = torch.Generator().manual_seed(node)
        count = 1 + node % spec.num_classes
        classes = torch.randperm(spec.num_classes, generator=generator)[:count]
        own = [
            places[torch.randperm(len(places), generator=generator)[:IMAGES_A_CLASS]]
            for c in classes
            for places in [(samples.labels == c).nonzero()[:, 0]]
        ]
        yield classes, samples.subset(torch.cat(own)), generator


def classes_found(
    view: View, known: Canaries, samples: Samples, spec: DataSpec, nodes: int
) -> Curve:
    """How well the classes of nodes are told by the shares of known images in what is seen."""
    of_class = functional.one_hot(known.labels, spec.num_classes).double().numpy()
    present = np.zeros((nodes, spec.num_classes), bool)
    scores = np.zeros((nodes, spec.num_classes))
    for node, (classes, own, _) in enumerate(nodes_of(samples, spec, nodes)):
        present[node, classes] = True
        scores[node] = view.of(own)[view.attacks.index("change")] @ of_class
    return curve(present.T, scores.T, np.random.default_rng(0))


def parcels(samples: Samples, spec: DataSpec, nodes: int) -> tuple[Floats, Floats, Floats]:
    """Number of classes, bytes and seconds of the virtual data of nodes with 1 to all classes.

    Bytes are those before they are padded and sealed.
    """
    counts, sizes, seconds = [], [], []
    drawn = nodes_of(samples, spec, nodes)
    for classes, own, generator in track(drawn, "parcels", nodes, transient=True):
        begin = time.perf_counter()
        (virtual,) = distill_many(
            DISTILLATION.distiller,
            [(own.inputs, own.labels)],
            num_classes=spec.num_classes,
            per_class=max(1, DISTILLATION.distilled_size // len(classes)),
            init=DISTILLATION.start,
            steps=None,
            generators=[generator],
            formation=DISTILLATION.formation,
        )
        seconds.append(time.perf_counter() - begin)
        sizes.append(len(virtual.to_bytes(DISTILLATION.bits)))
        counts.append(len(classes))
    return np.array(counts, float), np.array(sizes, float), np.array(seconds)


def guessed_by(seen: Floats, counts: Floats) -> float:
    """Share of nodes whose number of classes is guessed by the nodes of the other half."""
    kinds, later = np.unique(counts), np.arange(len(counts)) >= len(counts) // 2
    right = 0
    for known, guessed in ((later, ~later), (~later, later)):
        distances = np.abs(seen[guessed][:, None] - seen[known])
        alike = distances == distances.min(1, keepdims=True)
        votes = alike.astype(int) @ (counts[known][:, None] == kinds)
        right += int((kinds[votes.argmax(1)] == counts[guessed]).sum())
    return right / len(counts)


def all_views(data: Dataset, chosen: Canaries) -> list[View]:
    """What each party sees of a node, by what that says of the chosen images."""
    held_back = data.test.to_samples(data.spec)
    new = create_model("auto", data.spec, seed=0)
    good = trained(replace(QUICK, steps=GOOD_STEPS), held_back, data.spec, seed=0)
    rest = [held_back.subset(part) for part in torch.arange(len(held_back)).chunk(OTHERS)]
    again = f"of {ROUNDS} rounds"
    return [
        models_view("server, leader", "a node's model, first round", new, chosen),
        models_view("server, leader", "a node's model, later", good, chosen),
        models_view("server, leader", f"a node's models {again}", new, chosen, rest, rounds=ROUNDS),
        models_view("server of means", "mean of five models, later", good, chosen, rest, mean=True),
        models_view(
            "server of means",
            f"means of five models {again}",
            new,
            chosen,
            rest,
            rounds=ROUNDS,
            mean=True,
        ),
        labels_view(new, chosen, data.spec),
    ]


def attacked_views(data: Dataset, options: Any, console: Console) -> list[dict[str, Any]]:
    """Attack what each party sees of a node's images, and print the table."""
    samples = data.train.to_samples(data.spec)
    own = samples.labels < CLASSES
    chosen = with_canaries(samples.inputs[own], samples.labels[own], options.canaries, seeded())
    members = draw_members(options.sets, chosen, np.random.default_rng(0))
    table = Table("party", "sees", "best attack", "AUC", "at 1 %", "at 0.1 %", "worst at 0.1 %")
    rows: list[dict[str, Any]] = []
    for view in all_views(data, chosen):
        found = strongest(view, chosen, members)
        shown = [f"{s.value:.3f} ({s.low:.3f} to {s.high:.3f})" for s in found.curve]
        worst = ", ".join(f"{kind} {share.value:.3f}" for kind, share in found.worst.items())
        table.add_row(view.party, view.sees, found.attack, *shown, worst)
        row = {"party": view.party, "sees": view.sees, "attack": found.attack}
        rows.append({**row, **found.curve._asdict(), "worst": found.worst})
    console.print(table)
    return rows


def found_classes(data: Dataset, options: Any, console: Console) -> list[dict[str, Any]]:
    """Guess which classes nodes have, and print the table."""
    samples, held_back = (part.to_samples(data.spec) for part in (data.train, data.test))
    known = torch.cat(
        [(held_back.labels == c).nonzero()[:KNOWN_A_CLASS, 0] for c in range(data.spec.num_classes)]
    )
    chosen = with_canaries(held_back.inputs[known], held_back.labels[known], 0, seeded())
    table = Table("party", "sees", "AUC of a class being there", "found with 1 % false")
    rows: list[dict[str, Any]] = []
    for view in all_views(data, chosen):
        auc, found, _ = classes_found(view, chosen, samples, data.spec, options.nodes)
        shown = [f"{s.value:.3f} ({s.low:.3f} to {s.high:.3f})" for s in (auc, found)]
        table.add_row(view.party, view.sees, *shown)
        rows.append({"party": view.party, "sees": view.sees, "auc": auc, "at_1pct": found})
    console.print(table)
    return rows


def main() -> None:
    """Attack all views, guess classes of parcels, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=257, help="one more than the shadows")
    parser.add_argument("--canaries", type=int, default=10, help="of each of three kinds")
    parser.add_argument("--nodes", type=int, default=100, help="whose classes are guessed")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=ATTACKS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    data, console = load_dataset("digits"), Console()
    results: dict[str, Any] = {}
    if "views" in options.only:
        results["rows"] = attacked_views(data, options, console)
    if "classes" in options.only:
        results["classes"] = found_classes(data, options, console)
    if "parcels" in options.only:
        samples = data.train.to_samples(data.spec)
        counts, sizes, seconds = parcels(samples, data.spec, options.nodes)
        sealed = [sealed_size(int(size), VIRTUAL_DATA) for size in sizes]
        seen = {"size": np.array(sealed, float), "size without padding": sizes, "seconds": seconds}
        results["parcels"] = {by: guessed_by(own, counts) for by, own in seen.items()}
        for by, share in results["parcels"].items():
            low, high = share_bounds(round(share * len(counts)), len(counts))
            console.print(
                f"How many classes a node has is guessed by the {by} of its parcel for {share:.0%} "
                f"({low:.0%} to {high:.0%}) of {options.nodes} nodes; chance: "
                f"{1 / data.spec.num_classes:.0%}"
            )
        console.print(f"Padding and seal add {np.mean(sealed / sizes) - 1:.1%} to a parcel")
    write_json(options.json, results)


if __name__ == "__main__":
    main()
