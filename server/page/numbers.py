"""A run's result in a few numbers."""

from flwr_distill.server.page.comparison import accuracy_of, best, reached
from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.server.page.words import data_size, percent, seconds, stated

TARGET = 0.8  # accuracy


def numbers(run: RunFiles) -> list[tuple[str, str]]:
    """Name and value of each number; empty before the end of round 0."""
    if not run.rows:
        return []
    last, peak, target = run.rows[-1], best(run.rows), reached(run.rows, TARGET)
    nodes = run.about.get("nodes", {})
    samples = sum(node["samples"] or 0 for node in nodes.values())
    accuracy = []
    if peak:
        accuracy = [
            ("accuracy", stated(last)),
            ("best accuracy", f"{percent(accuracy_of(peak))}, round {peak['round']}"),
            ("rounds to 80 %", str(target["round"]) if target else "not reached"),
        ]
    if last["accuracy"] is not None:
        accuracy.append(("loss", f"{last['loss']:.3f}"))
    if last["accuracy"] is not None and last.get("node_accuracy") is not None:
        accuracy.append(("mean over nodes", percent(last["node_accuracy"])))
    return [
        *accuracy,
        ("rounds", f"{last['round']} of {run.settings['num-rounds']}"),
        *([("nodes", str(len(nodes))), ("training samples", f"{samples:,}")] if nodes else []),
        ("through the server", data_size(last["server_bytes"])),
        ("between nodes", data_size(last["link_bytes"])),
        ("seconds", seconds(last["seconds"])),
        ("warnings", str(sum("warning" in entry for entry in run.journal))),
    ]
