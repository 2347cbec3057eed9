"""How well a model does on what nodes hold out, with classes counting alike."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from flwr_distill.protocol.messages import NUM_EXAMPLES
from flwr_distill.protocol.replies import number

EVAL_ACCURACY = "eval-accuracy"


def held_out_accuracy(
    replies: Iterable[Message],
    max_samples: Mapping[int, int],
    classes: Mapping[int, Collection[int]],
) -> tuple[float | None, float]:
    """Mean accuracy on nodes' held-out samples, and on how many plain samples it is as certain.

    Parameters
    ----------
    max_samples : Mapping[int, int]
        What nodes have; they count for no more.
    classes : Mapping[int, Collection[int]]
        Their classes. Classes count alike if it has all nodes that replied, otherwise samples do.
    """
    samples, accuracies, held = [], [], []
    for reply in replies:
        node, claimed = reply.metadata.src_node_id, number(reply, NUM_EXAMPLES)
        samples.append(min(claimed, max_samples.get(node, claimed)))
        accuracies.append(number(reply, EVAL_ACCURACY))
        held.append(classes.get(node, ()))
    if not sum(samples):
        return None, 0.0
    sizes = np.array(samples, dtype=float)
    weights = class_weights(sizes, held) if all(held) else sizes / sizes.sum()
    used = weights > 0
    certainty = 1 / (weights[used] ** 2 / sizes[used]).sum()
    return float(weights @ np.array(accuracies)), float(certainty)


def class_weights(
    samples: NDArray[np.floating], classes: Sequence[Collection[int]]
) -> NDArray[np.floating]:
    """Weights of nodes' accuracies with which each class counts alike; their sum is 1.

    A node's samples pass for evenly spread over its classes, as it does not say how many it has of
    each. `samples` has shape (nodes,), each >= 0; `classes` are at least one a node.
    """
    names = sorted({label for held in classes for label in held})
    share = np.array([[name in held for name in names] for held in classes], dtype=float)
    of_class = samples[:, None] * share / share.sum(axis=1, keepdims=True)
    totals = of_class.sum(axis=0)
    seen = totals > 0
    weights: NDArray[np.floating] = (of_class[:, seen] / totals[seen]).mean(axis=1)
    return weights
