"""BlazeFL, written as its benchmark: its own FedAvg on its pool of threads, a thread a core.

Its example stores each client's samples in a file, and reads them one by one. Here they are in
memory, and a batch is read at once, which is faster.
"""

from typing import Any

from blazefl.contrib import (
    FedAvgBaseServerHandler,
    FedAvgPartitionType,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import ModelSelector, PartitionedDataset
from torch import Generator, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from benchmarks.peers.work import (
    BATCH,
    LEARNING_RATE,
    RoundLog,
    Work,
    cores,
    network,
    samples,
)


class Networks(ModelSelector[str]):
    """Has one network only."""

    def select_model(self, model_name: str) -> nn.Module:
        """The network, with its first weights."""
        return network()


class Partitions(PartitionedDataset[FedAvgPartitionType]):
    """Samples of each client, in memory."""

    def __init__(self, clients: int) -> None:
        self._clients = clients

    def get_dataset(self, type_: FedAvgPartitionType, cid: int | None) -> TensorDataset:
        """Samples of a client."""
        assert cid is not None
        return TensorDataset(*samples(self._clients, cid))

    def set_dataset(
        self, type_: FedAvgPartitionType, cid: int | None, dataset: TensorDataset
    ) -> None:
        """Not used by threads."""
        raise NotImplementedError

    def get_dataloader(
        self,
        type_: FedAvgPartitionType,
        cid: int | None,
        batch_size: int | None,
        generator: Generator | None,
    ) -> DataLoader[Any]:
        """Shuffled batches."""
        dataset = self.get_dataset(type_, cid)
        assert batch_size is not None
        sampler = BatchSampler(RandomSampler(dataset, generator=generator), batch_size, False)
        return DataLoader(dataset, sampler=sampler, batch_size=None)


def main() -> None:
    """Train by federated averaging, in the loop of BlazeFL's example, without evaluation."""
    work = Work.of_this_process()
    shared = {
        "model_selector": Networks(),
        "model_name": "CNN",
        "dataset": Partitions(work.clients),
        "num_clients": work.clients,
        "device": "cpu",
        "batch_size": BATCH,
        "seed": 0,
    }
    handler = FedAvgBaseServerHandler(
        global_round=work.rounds, sample_ratio=work.a_round / work.clients, **shared
    )
    trainer = FedAvgThreadPoolClientTrainer(
        epochs=1, lr=LEARNING_RATE, num_parallels=cores(), **shared
    )
    log = RoundLog(work, handler.model.parameters())
    while not handler.if_stop():
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        trained = trainer.uplink_package()
        steps = sum(package.data_size for package in trained) // BATCH
        for package in trained:
            handler.load(package)
        log.round_ended(handler.model.parameters(), steps)


if __name__ == "__main__":
    main()
