"""Differential privacy: the epsilon that nodes have spent."""

from server.page.run_files import RunFiles
from strategies.common.sections import Section, Table

MOST_OPEN = 12
"""More nodes than these wait to be opened."""
EXPLAINED = (
    "It bounds what all that a node sent in this run tells of whether any one sample was among "
    "those it trained on. Epsilon is counted by Rényi differential privacy over the steps that the "
    "node took. Not covered: how many samples a node has and of which classes, what it reports of "
    "held-out samples, and what its other runs tell."
)
TRAINED_WITHOUT = (
    "Only virtual data were made under differential privacy: train.dp-noise was 0, and what nodes "
    "sent besides is not covered."
)


def spent(run: RunFiles) -> dict[str, float]:
    """Largest epsilon that each node reported, by name."""
    found: dict[str, float] = {}
    for entry in run.journal:
        for node, numbers in entry.get("nodes", {}).items():
            if "dp-epsilon" in numbers:
                name = run.name(node)
                found[name] = max(found.get(name, 0.0), numbers["dp-epsilon"])
    return found


def privacy(run: RunFiles) -> Section | None:
    """Return what nodes have spent; None where none has reported it."""
    if not (epsilons := spent(run)):
        return None
    train = run.settings["train"]
    largest = (
        f"The largest epsilon of {len(epsilons)} nodes is {max(epsilons.values()):.3g}, at delta = "
        f"{train['dp-delta']:g}."
    )
    rows = [[node, f"{epsilon:.3g}"] for node, epsilon in epsilons.items()]
    folded = f"Epsilon of {len(rows)} nodes" if len(rows) > MOST_OPEN else ""
    return Section(
        "Differential privacy",
        [largest, EXPLAINED if train["dp-noise"] else TRAINED_WITHOUT],
        [Table(["node", "#epsilon"], rows, folded=folded)],
    )
