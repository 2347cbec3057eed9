"""Differential privacy: the epsilon that nodes have spent."""

from flwr_distill.base.text import counted
from flwr_distill.server.page.method import private_by_method
from flwr_distill.server.page.run_files import RunFiles
from flwr_distill.strategies.common.sections import Section, Table

MAX_OPEN = 12
"""With more nodes, the table is folded."""
EXPLAINED = (
    "It bounds how much a node's messages in this run reveal about whether any one sample was in "
    "its training data. Epsilon is counted by Rényi differential privacy over all that the node "
    "released. Not covered: how many samples a node has and of which classes, metrics on its "
    "held-out samples, and other runs with the same data."
)
TRAINED_WITHOUT = (
    "Only the virtual data were made under differential privacy: train.dp-noise was 0, so "
    "everything else that nodes sent is not covered."
)


def spent(run: RunFiles, key: str = "dp-epsilon") -> dict[str, float]:
    """Largest epsilon that each node reported, by name."""
    epsilons: dict[str, float] = {}
    for _, node, epsilon in run.reported(key):
        epsilons[node] = max(epsilons.get(node, 0.0), epsilon)
    return epsilons


def of_whole_nodes(run: RunFiles) -> str:
    """What the epsilon of all samples of a node together says; '' if no node reported any."""
    if not (of_all := spent(run, "dp-epsilon-of-all").values()):
        return ""
    least, most = f"{min(of_all):.3g}", f"{max(of_all):.3g}"
    return (
        "All samples of a node together have an epsilon of "
        f"{least if least == most else f'{least} to {most}'}. That bounds what is revealed of a "
        "node as a whole, or of a person with many samples; above about 10 it hides nobody."
    )


def privacy(run: RunFiles) -> Section | None:
    """Epsilon by node; None if no node reported any."""
    if not (epsilons := spent(run)):
        return None
    train = run.settings["train"]
    covered = train["dp-noise"] or private_by_method(run)
    largest = (
        f"The largest epsilon of {counted(len(epsilons), 'node')} is "
        f"{max(epsilons.values()):.3g}, at delta = {train['dp-delta']:g}."
    )
    rows = [[node, f"{epsilon:.3g}"] for node, epsilon in epsilons.items()]
    folded = f"Epsilon of {len(rows)} nodes" if len(rows) > MAX_OPEN else ""
    texts = (largest, of_whole_nodes(run), EXPLAINED if covered else TRAINED_WITHOUT)
    return Section(
        "Differential privacy",
        [text for text in texts if text],
        [Table(["node", "#epsilon"], rows, folded=folded)],
    )
