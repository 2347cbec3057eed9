"""Which replies no aggregate should see: malformed ones, and claims or updates of absurd size."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, Message

from strategies.arrays import as_arrays, sent_arrays
from strategies.replies import number
from strategies.sectors import Arrays, check_arrays
from task.messages import ARRAYS, NUM_EXAMPLES, TRAIN_VIRTUAL

SCREENED = frozenset({"train", TRAIN_VIRTUAL, "evaluate"})
"""Message types whose replies are averaged."""
FEWEST = 4
"""Fewest values among which one can be absurd."""
SMALLEST_SCALE = 1.0
"""Spread of logarithms, a factor e, below which values are as good as equal."""
EXAMPLES_THRESHOLD = 7.0
"""For claimed samples: 1,100 times the median, or more where nodes differ more."""

K = TypeVar("K")


def reasons_to_set_aside(
    messages: Sequence[Message],
    replies: Sequence[Message],
    norm_threshold: float,
    types: Mapping[str, np.dtype[np.generic]],
) -> dict[int, str]:
    """Judge the replies to a phase.

    Parameters
    ----------
    messages : Sequence[Message]
        What was sent, all of one type of `SCREENED`.
    replies : Sequence[Message]
        What came; error replies among them are not judged.
    norm_threshold : float
        For norms of updates, see :func:`absurdly_large`.
    types : Mapping[str, dtype]
        Of the model's arrays as nodes train them, whatever was sent: Flower's strategies make
        floats of whole numbers, as BatchNorm's count of batches. An array that is not named here
        comes back as it was sent.

    Returns
    -------
    dict[int, str]
        By position of a reply in ``replies``, why it is to be set aside.
    """
    asked = {message.metadata.dst_node_id: message for message in messages}
    judged = {place: reply for place, reply in enumerate(replies) if reply.has_content()}
    if messages[0].metadata.message_type == TRAIN_VIRTUAL:  # a node may reply what it lacks
        judged = {place: r for place, r in judged.items() if ARRAYS in r.content.array_records}
    reasons = dict.fromkeys(_unlike_most(judged), "its records are not those of most replies")
    examples: dict[int, float] = {}
    norms: dict[str, dict[int, float]] = defaultdict(dict)
    sent: ArrayRecord | None = None
    start: Arrays | None = None
    for place, reply in judged.items():
        if place in reasons:
            continue
        record = asked[reply.metadata.src_node_id].content.array_records.get(ARRAYS)
        if record is not sent:  # most strategies send all nodes the same one
            sent, start = record, _as_trained(as_arrays(record), types) if record else None
        try:
            examples[place] = _claimed_examples(reply)
            for name in reply.content.array_records:
                began = start if name == ARRAYS else None
                norms[name][place] = update_norm(sent_arrays(reply, name), began)
        except ValueError as error:
            reasons[place] = str(error)
    for place in absurdly_large(examples, EXAMPLES_THRESHOLD):
        reasons.setdefault(place, f"its {NUM_EXAMPLES} are absurdly many")
    for name, of_name in norms.items():
        for place in absurdly_large(of_name, norm_threshold):
            reasons.setdefault(place, f"the norm of its {name} is beyond norm-threshold")
    return reasons


def update_norm(arrays: Arrays, start: Arrays | None) -> float:
    """Check a model that came from elsewhere, and measure how far it is from where it began.

    Parameters
    ----------
    arrays : Mapping[str, ndarray]
        Of the model that came; each is asked for once.
    start : Mapping[str, ndarray], optional
        Of the model that it began as. If None, any finite arrays will do, and began as zeros.

    Returns
    -------
    float
        L2 norm over all arrays of floating-point numbers.

    Raises
    ------
    ValueError
        If an array cannot be read, a name, shape or type differs, or a value is not finite.
    """
    squares = 0.0
    for name in dict.fromkeys([*arrays, *(start or {})]):
        came = {name: arrays[name]} if name in arrays else {}
        began = came if start is None else {name: start[name]} if name in start else {}
        check_arrays(came, began)
        if came[name].dtype.kind == "f":
            change = came[name].astype(np.float64)
            if start is not None:
                np.subtract(change, start[name], out=change)
            squares += float(np.vdot(change, change))
    return math.sqrt(squares)


def absurdly_large(values: Mapping[K, float], threshold: float) -> list[K]:
    """Find values that are absurdly large among the others: outliers of their logarithms.

    A value's score is the distance of its logarithm above their median, in units of
    ``1.4826 MAD`` (the standard deviation, were they normal), or of 1 where that is smaller.

    Parameters
    ----------
    values : Mapping[K, float]
        None negative. Zeros are left out, and fewer than 4 values are not judged.
    threshold : float
        Score above which a value is absurd; with 0 none is.

    Returns
    -------
    list[K]
        Keys of the absurd values.
    """
    keys = [key for key, value in values.items() if value > 0]
    if threshold == 0 or len(keys) < FEWEST:
        return []
    logs = np.log([values[key] for key in keys])
    above = logs - np.median(logs)
    scale = max(1.4826 * float(np.median(np.abs(above))), SMALLEST_SCALE)
    return [key for key, score in zip(keys, above / scale, strict=True) if score > threshold]


def _as_trained(arrays: Arrays, types: Mapping[str, np.dtype[np.generic]]) -> Arrays:
    """The model as a node that was sent it begins with it."""
    return {
        name: array.astype(types.get(name, array.dtype), copy=False)
        for name, array in arrays.items()
    }


def _unlike_most(replies: Mapping[int, Message]) -> list[int]:
    """Positions of replies whose records differ from most, which Flower's strategies refuse."""
    forms = {place: _form(reply) for place, reply in replies.items()}
    counts = Counter(forms.values())
    usual = max(counts, key=lambda form: (counts[form], len(form)), default=None)
    return [place for place, form in forms.items() if form != usual]


def _form(reply: Message) -> frozenset[tuple[str, ...]]:
    """Names of the array records, and of each metric record the keys with lengths of lists."""
    metrics = (
        (name, key, str(len(value) if isinstance(value, list) else ""))
        for name, record in reply.content.metric_records.items()
        for key, value in record.items()
    )
    return frozenset([*((name,) for name in reply.content.array_records), *metrics])


def _claimed_examples(reply: Message) -> float:
    if (claimed := number(reply, NUM_EXAMPLES)) < 1:
        raise ValueError(f"its {NUM_EXAMPLES} are {claimed}")
    return claimed
