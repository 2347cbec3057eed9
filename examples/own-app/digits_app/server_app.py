"""The app's own ServerApp, with flwr-distill's HFLDD in Flower's loop."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits_app.task import Net, accuracy, digits
from flwr_distill.strategies.hfldd import HFLDD

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and keep the model."""
    if context.run_config["strategy"] == "hfldd":
        strategy = HFLDD(distilled_size=40, fraction_evaluate=1.0)
    else:
        strategy = FedAvg()
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
        train_config=ConfigRecord({"lr": 0.05}),
        evaluate_fn=evaluate,
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Evaluate the global model on digits that no node has."""
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": accuracy(model, *digits("server"))})
