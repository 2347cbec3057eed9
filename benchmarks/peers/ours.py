"""Simulations of this project; ``python -m benchmarks.peers.ours`` is the one in one process.

Checkpoints, journal and report are on, as for any run.
"""

import json
from pathlib import Path

import torch
from flwr.app import ArrayRecord
from torch import nn

from benchmarks.in_process import Settings, run_in_process
from benchmarks.peers.work import (
    BATCH,
    CLASSES,
    LEARNING_RATE,
    SAMPLES,
    SHAPE,
    RoundLog,
    Work,
    network,
    pixels,
)
from flwr_distill.server.hooks import Hook, PhaseEnd, RoundEnd
from flwr_distill.task.datasets import Dataset, DataSpec, RawSamples


def run_config(work: Work) -> dict[str, bool | int | float | str]:
    """Settings of a run."""
    split = Path(work.folder) / "split.json"
    places = torch.arange(work.clients * SAMPLES).reshape(-1, SAMPLES).tolist()
    split.write_text(json.dumps(dict(enumerate(places))))
    return {
        "strategy": "fedavg",
        "num-rounds": work.rounds,
        "fraction-train": work.a_round / work.clients,
        "min-nodes": work.clients,
        "dataset": "benchmarks.peers.ours:random_pixels",
        "model": "benchmarks.peers.ours:model",
        "hooks": "benchmarks.peers.ours:Rounds",
        "partition.scheme": "index-file",
        "partition.index-file": str(split),
        "train.lr": LEARNING_RATE,
        "train.batch-size": BATCH,
        "train.local-epochs": 1,
        "train.holdout": 0.0,
        "server-device": "cpu",
    }


def random_pixels(root: Path, download: bool) -> Dataset:
    """All clients' samples: a plug-in for ``dataset``."""
    images, labels = pixels(Work.of_this_process().clients)
    samples = RawSamples(images.reshape(-1, *SHAPE).numpy(), labels.flatten().numpy())
    half = (0.5,) * SHAPE[0]
    return Dataset(DataSpec("random", SHAPE, CLASSES, half, half), samples, samples.subset([0]))


def model(spec: DataSpec) -> nn.Module:
    """The network: a plug-in for ``model``."""
    return network()


class Rounds(Hook):
    """Logs each round: a plug-in for ``hooks``."""

    def __init__(self) -> None:
        self._log: RoundLog | None = None
        self._steps = 0

    def on_phase(self, phase: PhaseEnd) -> None:
        """Count the steps of all clients."""
        if phase.name == "train":
            self._steps = sum(int(node["num-steps"]) for node in phase.nodes.values())

    def on_round_end(self, end: RoundEnd) -> None:
        """Log a round, but for round 0, which is the initial model."""
        assert isinstance(end.model, ArrayRecord)
        weights = end.model.to_torch_state_dict().values()
        if self._log is None:
            self._log = RoundLog(Work.of_this_process(), weights)
        else:
            self._log.round_ended(weights, self._steps)


def main() -> None:
    """Run server and clients in this process."""
    work = Work.of_this_process()
    nodes: list[Settings] = [{"num-partitions": work.clients, "device": "cpu"}] * work.clients
    run_in_process(run_config(work), nodes, Path(work.folder) / "runs")


if __name__ == "__main__":
    main()
