"""Ends a run in someone's own ServerApp where nodes cannot answer a strategy, and says why."""

from collections.abc import Iterable
from typing import Any, cast

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flwr_distill.protocol.meeting import DESCRIBE, one_line
from flwr_distill.protocol.registry import method_of
from flwr_distill.protocol.replies import (
    NothingUsableError,
    books_replies,
    handlers_remedy,
    has_no_handler,
)
from flwr_distill.strategies.common.directory import by_reason

MAX_FAILED = 2
"""Phases in a row in which no node answers; a single one may be a few nodes' bad moment."""
MIN_NODES = 3
"""Nodes that must have failed in these, or all connected ones: others may take their place."""


class UnansweredError(NothingUsableError):
    """No node answers the strategy class at ``where``, which last sent ``message_type``."""

    def __init__(self, strategy: str, message_type: str, reason: str, remedy: str = "") -> None:
        super().__init__(f"{message_type}: {reason}", where=strategy, remedy=remedy)
        self.message_type = message_type


class MissingHandlerError(UnansweredError):
    """The nodes' ClientApp has no handler for what a strategy sends."""


class Answered(Strategy):
    """A strategy whose run ends with an error if no node answers it.

    Flower's loop continues to the last round instead, and returns a result without a model. Our
    ServerApp counts failed rounds itself.
    """

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """Execute the strategy; arguments are those of Flower's ``Strategy.start``.

        Raises
        ------
        MissingHandlerError
            If the nodes' ClientApp has no handler for what the strategy sends.
        UnansweredError
            If no node answers for another reason, or no round made a model.
        """
        if books_replies(grid):
            return super().start(grid, *args, **kwargs)
        answers = Answers(grid, self)
        try:
            result = super().start(cast(Grid, answers), *args, **kwargs)
        except UnansweredError:
            raise
        except NothingUsableError as error:
            raise answers.error(str(error)) from error
        if answers.message_type and not result.arrays:
            raise answers.error("no round made a model")
        return result


def has_own_loop(strategy: type[Strategy]) -> bool:
    """Whether a strategy's loop is another than Flower's."""
    return strategy.start not in (Strategy.start, Answered.start)


class Answers:
    """A grid that raises where no node answers a strategy.

    Attributes
    ----------
    message_type : str
        What was sent last; empty if nothing was.
    """

    def __init__(self, grid: Grid, strategy: Strategy) -> None:
        self.message_type = ""
        self._grid = grid
        self._strategy = type(strategy)
        self._method = method_of(self._strategy)
        self._unproven = self._method is not None and self._method.trains_plainly
        self._answered = False
        self._failed = 0  # phases in a row
        self._silent: set[int] = set()  # nodes in these
        self._reasons = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Send messages and wait for the replies, as Flower's grid does.

        Raises UnansweredError if no node answers, as often as `MAX_FAILED` says, or at first for
        want of a handler.
        """
        messages = list(messages)
        if not messages:
            return []
        nodes = [message.metadata.dst_node_id for message in messages]
        self.message_type = messages[0].metadata.message_type
        if self._unproven and self.message_type == MessageType.TRAIN:
            self._prove(nodes, timeout)
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        self._note(nodes, replies)
        return replies

    def error(self, what: str) -> UnansweredError:
        """What to raise, with the nodes' last reasons."""
        reason = f"{what}: {self._reasons}" if self._reasons else f"{what} (the log says why)"
        return UnansweredError(self._strategy.__name__, self.message_type, reason)

    def _prove(self, nodes: list[int], timeout: float | None) -> None:
        """Check that nodes have our handlers: another ``train`` answers, and leaves out the method.

        Raises MissingHandlerError if no node has them.
        """
        self._unproven = False
        questions = [Message(RecordDict(), node, DESCRIBE) for node in nodes]
        replies = list(self._grid.send_and_receive(questions, timeout=timeout))
        if replies and all(map(has_no_handler, replies)):
            raise self._missing("their own @app.train() would leave out what the method adds")

    def _note(self, nodes: list[int], replies: list[Message]) -> None:
        if any(reply.has_content() for reply in replies):
            self._answered, self._failed, self._reasons = True, 0, ""
            self._silent.clear()
            return
        self._failed += 1
        self._silent.update(nodes)
        reasons = dict.fromkeys(nodes, "no answer in time")
        reasons |= {r.metadata.src_node_id: one_line(r.error.reason) for r in replies}
        self._reasons = "; ".join(by_reason({f"node {n}": (why,) for n, why in reasons.items()}))
        needed = min(MIN_NODES, len(set(self._grid.get_node_ids())))
        hopeless = self._failed >= MAX_FAILED and len(self._silent) >= needed
        if replies and all(map(has_no_handler, replies)) and (hopeless or not self._answered):
            raise self._missing("the nodes' ClientApp has no handler for it")
        if hopeless:
            raise self.error("no node answers")

    def _missing(self, reason: str) -> MissingHandlerError:
        name = self._method.name if self._method else "..."
        strategy, remedy = self._strategy.__name__, handlers_remedy(name)
        return MissingHandlerError(strategy, self.message_type, reason, remedy)
