"""Fetches the replies to a phase's messages as they arrive, over any Flower Grid."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from flwr_distill.protocol.replies import SET_ASIDE, UNKNOWN, UNREADABLE
from flwr_distill.server.grid.ledger import content_bytes, num_parts
from flwr_distill.server.line import pulls

PULLS = 64
"""Replies that one fetch pulls one by one, so that its cost does not grow with the nodes."""
PATIENCE = 0.5
"""Seconds in which the pulls of a fetch mostly end; longer ones continue meanwhile."""
SUPERLINK = 1
"""Flower's id of the SuperLink, which reports the nodes that were lost."""
_CONNECTION = ("grpc", "httpx")
"""Packages whose errors are the SuperLink's, and not about what a node has sent."""


@dataclass(frozen=True)
class Most:
    """The most that a reply may hold: bytes, and parts, which are records and arrays in them."""

    num_bytes: int
    num_parts: int


class Inbox:
    """Replies that a phase waits for.

    A reply counts if its sender is the node that its message went to. One that is larger than
    `most` of its message counts as an error. `messages` are by id.
    """

    def __init__(
        self, grid: Grid, messages: Mapping[str, Message], most: Callable[[Message], Most]
    ) -> None:
        self.waiting = set(messages)
        """Ids of the messages without a reply so far."""
        self.rejected: list[tuple[Message, str]] = []
        """Messages with a reply of another node, and why that shows; they stay awaited."""
        self._grid = grid
        self._messages = dict(messages)
        self._most = most

    def add(self, messages: Mapping[str, Message]) -> None:
        """Wait for the replies to further messages, too."""
        self.waiting.update(messages)
        self._messages.update(messages)

    def forget(self, message_id: str) -> None:
        """No longer wait for the reply to a message."""
        self.waiting.discard(message_id)
        self._messages.pop(message_id, None)

    def fetch(self, end: float) -> Iterator[Message]:
        """Yield the replies that have arrived; stop at `end`, in ``time.monotonic()`` seconds."""
        for reply in self._grid.pull_messages(set(self.waiting)):
            message_id, node = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
            if self._is_own(message_id, node, error=reply.has_error()):
                yield self._reply(message_id, answer_of(reply))

    @property
    def coming(self) -> bool:
        """Whether part of a reply has arrived, so that it pays to poll again soon."""
        return False

    def wait(self, seconds: float) -> None:
        """Wait so long for further replies; a grid that knows when one arrives ends it then."""
        getattr(self._grid, "wait", time.sleep)(seconds)

    def close(self) -> None:
        """Stop waiting for the remaining replies."""

    def _is_own(self, message_id: str, node: int, *, error: bool) -> bool:
        """Whether the node that was asked replies, or the SuperLink reports an error for it."""
        if (message := self._messages.get(message_id)) is None:
            return False  # a second reply
        if node == message.metadata.dst_node_id or (error and node == SUPERLINK):
            return True
        self.rejected.append((message, f"node {node} has sent it"))
        return False

    def _reply(self, message_id: str, answer: RecordDict | Error) -> Message:
        self.waiting.discard(message_id)
        message = self._messages.pop(message_id)  # it has a model, and an inbox may last for a run
        if isinstance(answer, RecordDict):
            most = self._most(message)
            if content_bytes(answer) > most.num_bytes:
                answer = too_large(most.num_bytes, "bytes")
            elif num_parts(answer) > most.num_parts:
                answer = too_large(most.num_parts, "parts")
        return Message(answer, reply_to=message)


class OneByOneInbox(Inbox):
    """Replies through a SuperLink, by Flower's own `pull_messages`, one at a time.

    Of several replies, one that cannot be read would take the others with it: Flower drops each
    from the SuperLink as it goes. Pulls run side by side, since Flower waits for what a node has
    announced and not sent, which would hold up the others.
    """

    def __init__(
        self, grid: Grid, messages: Mapping[str, Message], most: Callable[[Message], Most]
    ) -> None:
        super().__init__(grid, messages, most)
        self._turn = deque(messages)
        self._pulls: dict[Future[list[Message]], str] = {}
        self._pool = ThreadPoolExecutor(PULLS, thread_name_prefix="pull")
        pulls().patch_pull_backoff()

    def fetch(self, end: float) -> Iterator[Message]:
        """Yield replies that have arrived; see `Inbox`."""
        pulls().limit_pulls(max(0.0, end - time.monotonic()))
        started = []
        while self._turn and len(self._pulls) < PULLS and time.monotonic() < end:
            started.append(self._pool.submit(self._pull, message_id := self._turn.popleft()))
            self._pulls[started[-1]] = message_id
        wait(started, PATIENCE)
        for pull in [pull for pull in self._pulls if pull.done()]:
            message_id = self._pulls.pop(pull)
            if message_id not in self.waiting:
                continue
            if (answer := self._answer(message_id, pull)) is None:
                self._turn.append(message_id)
            else:
                yield self._reply(message_id, answer)

    def add(self, messages: Mapping[str, Message]) -> None:
        """Wait for the replies to further messages, too."""
        super().add(messages)
        self._turn.extend(messages)

    def forget(self, message_id: str) -> None:
        """No longer wait for the reply to a message; a pull in flight ends by itself."""
        super().forget(message_id)
        if message_id in self._turn:
            self._turn.remove(message_id)

    @property
    def coming(self) -> bool:
        """Whether part of a reply has arrived."""
        return bool(self._pulls)

    def close(self) -> None:
        """Stop waiting for the remaining replies; pulls that wait end when the phase would."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _pull(self, message_id: str) -> list[Message]:
        most = self._most(self._messages[message_id])
        with pulls().arrays_within(most.num_bytes):
            return list(self._grid.pull_messages([message_id]))

    def _answer(self, message_id: str, pull: Future[list[Message]]) -> RecordDict | Error | None:
        try:
            for reply in pull.result():
                node = reply.metadata.src_node_id
                if self._is_own(message_id, node, error=reply.has_error()):
                    return answer_of(reply)
        except Exception as error:  # a node may send anything
            if type(error).__module__.partition(".")[0] in _CONNECTION:
                raise
            return unreadable(error)
        return None


def answer_of(reply: Message) -> RecordDict | Error:
    """A node's answer; it cannot use the codes of errors that only the server gives."""
    if not reply.has_error():
        return reply.content
    if reply.error.code in (SET_ASIDE, UNREADABLE):
        return Error(UNKNOWN, reply.error.reason)
    return reply.error


def too_large(most: int, what: str) -> Error:
    """The error that replaces a reply with more than `most` bytes or parts."""
    return Error(UNREADABLE, f"Its reply has more than {most:,} {what}, the most for this phase")


def unreadable(error: Exception) -> Error:
    """The error that replaces a reply that cannot be read."""
    return Error(UNREADABLE, f"Its reply cannot be read: {error}")
