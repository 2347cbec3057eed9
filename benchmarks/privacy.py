"""Membership inference (LiRA, `distill.membership`) against the final models of several methods.

``python -m benchmarks.privacy [--shadows 12] [--targets 4] [--rounds 30] [--json FILE] [--plot
FILE]``

Each model is trained on a random half of the digits' training samples, on five nodes with five
local epochs per round, to learn the samples well; target models are attacked with the shadow
models. Published attacks train hundreds of shadow models and would find more.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from benchmarks.figures import write_json
from benchmarks.in_process import Settings, run_in_process
from flwr_distill.distill.membership import (
    Flags,
    Floats,
    auc,
    balanced_halves,
    logit_confidence,
    membership_scores,
    true_positives_at,
)
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.models import create_model
from flwr_distill.task.partition import partition_indices

NODES = 5
FALSE_POSITIVES = 0.01
Attack = tuple[Flags, Floats]
"""Members, and the attack's score of each sample."""
SETTING: Settings = {
    "dataset": "digits",
    "partition.scheme": "index-file",
    "train.local-epochs": 5,
    "train.holdout": 0.0,
}
METHODS: dict[str, Settings] = {
    "FedAvg, real data": {"strategy": "fedavg"},
    "HFLDD": {"strategy": "hfldd"},
    "FedLGD": {"strategy": "fedlgd", "fedlgd.first-steps": 200, "fedlgd.selections": 2},
}


def trained_model(run_config: Settings, members: Flags, seed: int) -> tuple[Floats, float]:
    """Train on the members; return logit confidence on all samples, and test accuracy."""
    data = load_dataset("digits")
    train, own = data.train.to_samples(data.spec), np.flatnonzero(members)
    parts = partition_indices(data.train.labels[own], NODES, scheme="iid", seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        index_file = Path(folder) / "nodes.json"
        index_file.write_text(json.dumps({str(i): own[p].tolist() for i, p in enumerate(parts)}))
        settings = {**SETTING, **run_config, "seed": seed, "partition.index-file": str(index_file)}
        rows = run_in_process(settings, [{"num-partitions": NODES}] * NODES, Path(folder))
        weights = load_file(Path(folder) / "1" / "model.safetensors")
    model = create_model("auto", data.spec).eval()
    model.load_state_dict(weights)
    with torch.inference_mode():
        logits = model(train.inputs).double().numpy()
    return logit_confidence(logits, data.train.labels), rows[-1]["accuracy"]


def main() -> None:
    """Attack all methods, print the table, write JSON and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shadows", type=int, default=12)
    parser.add_argument("--targets", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ROC curves there")
    arguments = parser.parse_args()

    samples, generator = len(load_dataset("digits").train), np.random.default_rng(0)
    shadowed = balanced_halves(arguments.shadows, samples, generator)
    attacked = generator.random((arguments.targets, samples)) < 0.5
    console = Console()
    table = Table("method", "test accuracy", "ROC AUC", f"found at {FALSE_POSITIVES:.0%} accused")
    rows: list[dict[str, str | float]] = []
    attacks: dict[str, list[Attack]] = {}
    for method, settings in METHODS.items():
        run_config = {**settings, "num-rounds": arguments.rounds}
        halves = np.concatenate([shadowed, attacked])
        models = [trained_model(run_config, own, seed) for seed, own in enumerate(halves)]
        shadows, targets = models[: arguments.shadows], models[arguments.shadows :]
        confidences = np.stack([confidence for confidence, _ in shadows])
        attacks[method] = [
            (own, membership_scores(confidence, confidences, shadowed))
            for own, (confidence, _) in zip(attacked, targets, strict=True)
        ]
        numbers = {
            "accuracy": statistics.mean(accuracy for _, accuracy in targets),
            "auc": statistics.mean(auc(*each) for each in attacks[method]),
            "tpr": statistics.mean(
                true_positives_at(FALSE_POSITIVES, *each) for each in attacks[method]
            ),
        }
        rows.append({"method": method, **numbers})
        cells = (method, *(f"{value:.3f}" for value in numbers.values()))
        table.add_row(*cells)
        console.print(*cells)
    console.print(table)
    write_json(arguments.json, rows)
    if arguments.plot is not None:
        roc_picture(attacks).savefig(arguments.plot, dpi=120)


def roc_picture(attacks: dict[str, list[Attack]]) -> Figure:
    """Mean ROC curve of each method's attacks, on logarithmic axes as in the paper."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    accused = np.logspace(-3, 0, 100)
    axes.plot(accused, accused, color="grey", linestyle=":", label="a guess")
    for method, each in attacks.items():
        shares = [[true_positives_at(rate, *one) for rate in accused] for one in each]
        axes.plot(accused, np.mean(shares, axis=0), label=method)
    axes.set(xscale="log", yscale="log", xlim=(1e-3, 1), ylim=(1e-3, 1))
    axes.set(xlabel="share of non-members accused", ylabel="share of members found")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    main()
