"""Which strategies suit how much the nodes' labels differ."""

from dataclasses import dataclass

ALIKE, ALIKE_FOR_ALL = 0.2, 0.1
"""Skew up to which the nodes' labels are as good as alike: for one head, and where all train."""
MOST = 0.75
"""Share of the classes: nodes with more may take long steps, with momentum."""


@dataclass(frozen=True)
class Candidates:
    """Strategies to try, the likeliest first, and what they follow from (see `candidates`)."""

    names: tuple[str, ...]
    skew: float | None
    held: float | None

    @property
    def reason(self) -> str:
        """What was seen of the nodes, for log and report."""
        if self.skew is None and self.held is None:
            return "the model is a frozen network, the best head of which is in the nodes' sums"
        seen = []
        if self.skew is not None:
            seen.append(f"the nodes' labels differ by {self.skew:.0%} of one class a node")
        if self.held is not None:
            seen.append(f"a node holds {self.held:.0%} of the classes")
        return ", and ".join(seen)


ON_FROZEN = Candidates(("analytic", "fedavg"), None, None)
"""Where nothing but the head of a frozen network trains."""


def held_suffices(held: float | None) -> bool:
    """Whether nodes have so many classes that how much labels differ need not be known."""
    return held is not None and held > MOST


def candidates(skew: float | None, held: float | None, *, all_train: bool = False) -> Candidates:
    """Choose by how much labels differ; docs/archive/benchmarks.md has the measurements.

    Nodes whose labels are alike, or that have most classes, mostly learn fastest with momentum.
    Else virtual data of all classes may teach more than any average of what nodes learned alone.
    Where all nodes train on these, that holds for nodes with most classes, too. FedAvg is always
    tried.

    Parameters
    ----------
    skew : float, optional
        See :func:`strategies.auto.skew.label_skew`; None does where `held_suffices`.
    held : float, optional
        Share of the classes that the median node has; None if a node does not say.
    all_train : bool (default: False)
        Whether all nodes train with HFLDD, and not its heads alone.
    """
    alike = ALIKE_FOR_ALL if all_train else ALIKE
    if skew is None or skew <= alike or (held_suffices(held) and not all_train):
        return Candidates(("fedfa", "fedavg"), skew, held)
    return Candidates(("hfldd", "fedavg"), skew, held)
