"""Flower Grid that sets broken and hostile replies aside before a strategy sees them.

Each reply is checked against its phase's schemas as it arrives. Replies that are averaged are
then compared with each other.
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
"""Allows num-examples up to 1,100 times the median, or more if nodes differ more."""

LONGEST_REASON = 300
"""Characters of a reason in log and journal."""


class ScreeningGrid(MeteredGrid):
    """Metered grid that replaces bad replies by error replies.

    Flower's strategies skip nodes with error replies. The log and the journal name each case.

    Parameters
    ----------
    *args, **kwargs
        See :class:`server.grid.metered.MeteredGrid`.
    norm_threshold : float (default: 5.0)
        For norms of updates, see :func:`protocol.outliers.absurdly_large`.
    model : Mapping[str, ndarray]
        A model of the run. If a message carries a model, the reply is compared with that one, but
        the types are always this model's: Flower's strategies turn integers, such as BatchNorm's
        count of batches, into floats, and nodes return them as integers.
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
        """The reply, or an error reply if it matches none of its phase's schemas."""
        if not reply.has_content():
            return reply
        phase = self._phases.get(message.metadata.message_type)
        checks = [schema.check for schema in phase.replies] if phase else [_check_readable]
        reasons = []
        for check in checks:
            try:
                check(reply.content, self._start_of(message))
                return reply
            except ValueError as error:
                reasons.append(str(error))
        return self._set_aside(message, reasons[0])

    def _screened(self, messages: list[Message], replies: list[Message]) -> list[Message]:
        """The replies, with error replies in place of outliers."""
        phase = self._phases.get(messages[0].metadata.message_type)
        if phase is None or not phase.compared:
            return replies
        by_node = {message.metadata.dst_node_id: message for message in messages}
        screened = list(replies)
        for place, reason in sorted(self._outliers(by_node, replies).items()):
            message = by_node[replies[place].metadata.src_node_id]
            screened[place] = self._set_aside(message, reason)
        return screened

    def _outliers(
        self, messages: Mapping[int, Message], replies: Sequence[Message]
    ) -> dict[int, str]:
        """Reasons to set replies aside, by their position."""
        trained = {
            place: reply
            for place, reply in enumerate(replies)
            if reply.has_content() and NUM_EXAMPLES in reply.content.metric_records.get(METRICS, {})
        }
        reasons = dict.fromkeys(
            _unlike_most(trained), "its records differ from those of most replies"
        )
        trained = {place: reply for place, reply in trained.items() if place not in reasons}
        examples: dict[int, float] = {}
        norms: dict[str, dict[int, float]] = defaultdict(dict)
        for place, reply in trained.items():
            examples[place] = reply.content.metric_records[METRICS][NUM_EXAMPLES]  # type: ignore[assignment]
            for name, record in reply.content.array_records.items():
                model = self._start_of(messages[reply.metadata.src_node_id])
                start = model if name == ARRAYS else None
                norms[name][place] = update_norm(RecordArrays(record), start)
        for place in absurdly_large(examples, EXAMPLES_THRESHOLD):
            reasons.setdefault(place, f"its {NUM_EXAMPLES} is far above the others'")
        for name, by_place in norms.items():
            for place in absurdly_large(by_place, self._norm_threshold):
                reasons.setdefault(place, f"the norm of its {name} exceeds norm-threshold")
        return reasons

    def _start_of(self, message: Message) -> Arrays:
        """The model that a node starts from: the message's, else the run's."""
        record = message.content.array_records.get(ARRAYS)
        if record is None:
            return self._model
        if record is not self._sent:  # most strategies send the same one to all nodes
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
        reason = reason[:LONGEST_REASON]  # it may quote what the node sent
        log(WARNING, "Reply of node %d to %s set aside: %s", node, phase, reason)
        if self._journal:
            self._journal.book_set_aside(node, phase, reason)
        return Message(Error(SET_ASIDE, reason), reply_to=message)


def _check_readable(content: RecordDict, model: Arrays) -> None:
    """Check a reply of a phase that no method declares."""
    for record in content.array_records.values():
        decode(record)


def _unlike_most(replies: Mapping[int, Message]) -> list[int]:
    """Positions of replies whose records differ from most; Flower's strategies raise on them."""
    forms = {place: _form(reply) for place, reply in replies.items()}
    counts = Counter(forms.values())
    usual = max(counts, key=lambda form: (counts[form], len(form)), default=None)
    return [place for place, form in forms.items() if form != usual]


def _form(reply: Message) -> frozenset[tuple[str, ...]]:
    """Names of array records; record, key and list length of each metric."""
    metrics = (
        (name, key, str(len(value) if isinstance(value, list) else ""))
        for name, record in reply.content.metric_records.items()
        for key, value in record.items()
    )
    return frozenset([*((name,) for name in reply.content.array_records), *metrics])
