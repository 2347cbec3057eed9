"""A Flower Grid that sets hostile and broken replies aside before a strategy sees them."""

from collections.abc import Mapping
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import Error, Message
from flwr.common import log

from server.grid import MeteredGrid
from strategies.replies import SET_ASIDE
from strategies.screening import SCREENED, reasons_to_set_aside


class ScreeningGrid(MeteredGrid):
    """Metered grid in which a reply that no aggregate should see becomes an error reply.

    Flower's strategies, and anyone's, leave nodes that failed out of the round. Each case is named
    in the log, and booked in the journal.

    Parameters
    ----------
    *args, **kwargs
        As :class:`server.grid.MeteredGrid` takes them.
    norm_threshold : float (default: 5.0)
        For norms of updates, see :func:`strategies.screening.absurdly_large`.
    types : Mapping[str, dtype], optional (default: None)
        Of the model's arrays; if None, they come back as they were sent.
    """

    def __init__(
        self,
        *args: Any,
        norm_threshold: float = 5.0,
        types: Mapping[str, np.dtype[np.generic]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._norm_threshold = norm_threshold
        self._types = types or {}

    def _screened(self, messages: list[Message], replies: list[Message]) -> list[Message]:
        phase = messages[0].metadata.message_type
        if phase not in SCREENED:
            return replies
        asked = {message.metadata.dst_node_id: message for message in messages}
        reasons = reasons_to_set_aside(messages, replies, self._norm_threshold, self._types)
        kept = list(replies)
        for place, reason in reasons.items():
            node = replies[place].metadata.src_node_id
            log(WARNING, "Reply of node %d to %s set aside: %s", node, phase, reason)
            if self._journal:
                self._journal.book_set_aside(node, phase, reason)
            kept[place] = Message(Error(SET_ASIDE, reason), reply_to=asked[node])
        return kept
