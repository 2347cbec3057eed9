"""A Flower Grid that sets hostile and broken replies aside before a strategy sees them.

Each reply is checked by itself as it comes, against what its phase allows. Replies that are
averaged are then compared with each other.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from logging import WARNING
from typing import Any

from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.common import log

from protocol.arrays import Arrays, RecordArrays, as_arrays, decode
from protocol.messages import ARRAYS, METRICS, NUM_EXAMPLES
from protocol.outliers import absurdly_large, update_norm
from protocol.replies import SET_ASIDE
from server.grid.metered import MeteredGrid

EXAMPLES_THRESHOLD = 7.0
"""For claimed samples: 1,100 times the median, or more where nodes differ more."""


class ScreeningGrid(MeteredGrid):
    """Metered grid in which a reply that no strategy should see becomes an error reply.

    Flower's strategies, and anyone's, leave nodes that failed out of the round. Each case is named
    in the log, and booked in the journal.

    Parameters
    ----------
    *args, **kwargs
        As :class:`server.grid.metered.MeteredGrid` takes them.
    norm_threshold : float (default: 5.0)
        For norms of updates, see :func:`protocol.outliers.absurdly_large`.
    model : Mapping[str, ndarray]
        A model of the run. Where a message brings a model, the reply's is compared with that, but
        for types: Flower's strategies make floats of whole numbers, such as BatchNorm's count of
        batches, and nodes send them back as this model has them.
    """

    def __init__(
        self,
        *args: Any,
        norm_threshold: float = 5.0,
        model: Arrays | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._norm_threshold = norm_threshold
        self._model = model or {}
        self._sent: ArrayRecord | None = None
        self._start: Arrays = {}

    def _accepted(self, message: Message, reply: Message) -> Message:
        """A reply, or an error in its place if it is not what its phase allows."""
        if not reply.has_content():
            return reply
        phase = self._phases.get(message.metadata.message_type)
        checks = [allowed.check for allowed in phase.replies] if phase else [_check_readable]
        reasons = []
        for check in checks:
            try:
                check(reply.content, self._start_of(message))
                return reply
            except ValueError as error:
                reasons.append(str(error))
        return self._set_aside(message, reasons[0])

    def _screened(self, messages: list[Message], replies: list[Message]) -> list[Message]:
        """Replies, with errors in place of those that stand out from the others."""
        phase = self._phases.get(messages[0].metadata.message_type)
        if phase is None or not phase.compared:
            return replies
        by_node = {message.metadata.dst_node_id: message for message in messages}
        reasons = self._outliers(by_node, replies)
        return [
            self._set_aside(by_node[reply.metadata.src_node_id], reasons[place])
            if place in reasons
            else reply
            for place, reply in enumerate(replies)
        ]

    def _outliers(
        self, messages: Mapping[int, Message], replies: Sequence[Message]
    ) -> dict[int, str]:
        """By position of a reply, why it is to be set aside."""
        judged = {
            place: reply
            for place, reply in enumerate(replies)
            if reply.has_content() and NUM_EXAMPLES in reply.content.metric_records.get(METRICS, {})
        }
        reasons = dict.fromkeys(_unlike_most(judged), "its records are not those of most replies")
        judged = {place: reply for place, reply in judged.items() if place not in reasons}
        examples: dict[int, float] = {}
        norms: dict[str, dict[int, float]] = defaultdict(dict)
        for place, reply in judged.items():
            examples[place] = reply.content.metric_records[METRICS][NUM_EXAMPLES]  # type: ignore[assignment]
            for name, record in reply.content.array_records.items():
                start = self._start_of(messages[reply.metadata.src_node_id])
                began = start if name == ARRAYS else None
                norms[name][place] = update_norm(RecordArrays(record), began)
        for place in absurdly_large(examples, EXAMPLES_THRESHOLD):
            reasons.setdefault(place, f"its {NUM_EXAMPLES} are absurdly many")
        for name, of_name in norms.items():
            for place in absurdly_large(of_name, self._norm_threshold):
                reasons.setdefault(place, f"the norm of its {name} is beyond norm-threshold")
        return reasons

    def _start_of(self, message: Message) -> Arrays:
        """The model that a node begins with: the message's, else the run's."""
        record = message.content.array_records.get(ARRAYS)
        if record is None:
            return self._model
        if record is not self._sent:  # most strategies send all nodes the same one
            self._sent = record
            self._start = {
                name: array.astype(self._model[name].dtype, copy=False)
                if name in self._model
                else array
                for name, array in as_arrays(record).items()
            }
        return self._start

    def _set_aside(self, message: Message, reason: str) -> Message:
        node, phase = message.metadata.dst_node_id, message.metadata.message_type
        log(WARNING, "Reply of node %d to %s set aside: %s", node, phase, reason)
        if self._journal:
            self._journal.book_set_aside(node, phase, reason)
        return Message(Error(SET_ASIDE, reason), reply_to=message)


def _check_readable(content: RecordDict, model: Arrays) -> None:
    """Check what is needed of any reply, also in a phase that no method declares."""
    for record in content.array_records.values():
        decode(record)


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
