"""A plain PyTorch loop over clients, in one process: what the other systems are compared with."""

import torch
from torch import Tensor

from benchmarks.peers.work import RoundLog, Work, network, samples, train_epoch


def main() -> None:
    """Train by federated averaging."""
    work = Work.of_this_process()
    model = network()
    weights: list[Tensor] = [weight.data for weight in model.parameters()]
    central = [weight.clone() for weight in weights]
    log = RoundLog(work, central)
    for _ in range(work.rounds):
        totals = [torch.zeros_like(weight) for weight in central]
        steps = 0
        for client in torch.randperm(work.clients)[: work.a_round].tolist():
            for weight, value in zip(weights, central, strict=True):
                weight.copy_(value)
            steps += train_epoch(model, *samples(work.clients, client))
            for total, weight in zip(totals, weights, strict=True):
                total += weight
        central = [total / work.a_round for total in totals]
        log.round_ended(central, steps)


if __name__ == "__main__":
    main()
