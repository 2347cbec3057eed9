"""FedAvg that logs the end of each round."""

from collections.abc import Iterable

from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from benchmarks.peers.work import RoundLog, Work, network

app = ServerApp()


class _Logged(FedAvg):
    """Counts the steps of each round."""

    steps = 0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up the clients' steps."""
        replies = [*replies]
        steps = [reply.content.metric_records["metrics"]["steps"] for reply in replies]
        self.steps = sum(one for one in steps if isinstance(one, int))
        return super().aggregate_train(server_round, replies)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train by federated averaging."""
    work = Work.of_this_process()
    strategy = _Logged(
        fraction_train=work.a_round / work.clients,
        fraction_evaluate=0.0,
        min_available_nodes=work.clients,
    )
    first = network().state_dict()
    log = RoundLog(work, first.values())

    def round_ended(server_round: int, arrays: ArrayRecord) -> None:
        if server_round:  # 0 is the initial model
            log.round_ended(arrays.to_torch_state_dict().values(), strategy.steps)

    strategy.start(grid, ArrayRecord(first), num_rounds=work.rounds, evaluate_fn=round_ended)
