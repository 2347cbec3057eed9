"""FedAvg that logs the seconds of each phase."""

import time
from collections.abc import Iterable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

_FLOATS_PER_ARRAY = 250_000


class _Timed(FedAvg):
    """Times each phase from sending its messages to having its replies."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Start the clock."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._start = time.perf_counter()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Stop the clock."""
        replies = list(replies)
        failed = sum(reply.has_error() for reply in replies)
        print(f"PHASE {time.perf_counter() - self._start:.4f} {len(replies)} {failed}", flush=True)
        for reply in replies:
            said = reply.content.metric_records["metrics"] if reply.has_content() else {}
            if "seconds" in said:
                print("STEP", said["seconds"], said["cpu-seconds"], flush=True)
        return super().aggregate_train(server_round, replies)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedAvg for some phases, with Flower's grid or ours."""
    config = context.run_config
    if config["fast"]:
        from flwr_distill.server.grid.grid import RunGrid
        from flwr_distill.server.grid.transport import Transport

        grid = RunGrid(Transport(grid, deadline=900.0))
    nodes, share = int(config["nodes"]), float(config["share"])
    strategy = _Timed(
        fraction_train=share,
        fraction_evaluate=0.0,
        min_train_nodes=round(share * nodes),
        min_available_nodes=nodes,
    )
    strategy.start(grid, _initial_arrays(context), num_rounds=int(config["phases"]), timeout=900.0)


def _initial_arrays(context: Context) -> ArrayRecord:
    if context.run_config["work"] == "digits":
        from rounds_app.model import build_model

        return ArrayRecord(build_model().state_dict())
    floats = round(float(context.run_config["megabytes"]) * 250_000)
    generator = np.random.default_rng(0)
    whole = generator.standard_normal(floats, dtype=np.float32)
    return ArrayRecord(np.array_split(whole, -(-floats // _FLOATS_PER_ARRAY)))
