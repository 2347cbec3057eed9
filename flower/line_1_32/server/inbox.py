"""Fetches replies through a SuperLink piece by piece."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, ErrorCode
from flwr.proto.appio_pb2 import PullAppMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectIdNotPreregisteredError,
    ObjectUnavailableError,
    pull_objects,
)
from flwr.superlink.grid import GrpcGrid

from flwr_distill.flower.inflating import InflationError, inflated
from flwr_distill.flower.line_1_32.server.batches import Calls
from flwr_distill.node.kernel import trim_heap
from flwr_distill.protocol.signatures import is_signed
from flwr_distill.server.grid.inbox import SUPERLINK, Inbox, Most, answer_of, too_large, unreadable
from flwr_distill.server.grid.ledger import content_bytes
from flwr_distill.task.errors import ReportedError

KEYS_VARIABLE = "FLWR_DISTILL_NODE_KEYS"
"""Variable of a ServerApp that names the file of nodes' keys, of `flwr-distill register`."""


class NodeKeysError(ReportedError, RuntimeError):
    """The file of nodes' keys cannot be read."""


class NodeKeys:
    """Keys of registered nodes, from a file that is read again when it has changed.

    An unreadable file raises `NodeKeysError`: replies would count that nobody has checked.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._version = (0, 0)
        self._keys: dict[int, ec.EllipticCurvePublicKey] = {}
        self._read()

    @classmethod
    def from_environment(cls) -> NodeKeys | None:
        """Keys from the file that the environment names; None if it names none."""
        return cls(Path(file)) if (file := os.environ.get(KEYS_VARIABLE)) else None

    def accept(self, header: Any) -> bool:
        """Whether a reply's node has signed it, or is not in the file."""
        self._read()
        key = self._keys.get(header.src_node_id)
        return key is None or is_signed(header, key)

    def _read(self) -> None:
        try:
            about = self._file.stat()
            version = about.st_mtime_ns, about.st_ino
            if version == self._version:
                return
            texts = json.loads(self._file.read_text(encoding="utf-8"))
            self._keys = {int(node): _key(text) for node, text in texts.items()}
            self._version = version
        except (OSError, ValueError, AttributeError) as error:
            raise NodeKeysError(
                f"cannot be read: {error}",
                where=KEYS_VARIABLE,
                value=str(self._file),
                remedy="name the nodes.json that `flwr-distill register` writes, or unset the "
                "variable",
            ) from error


def _key(text: str) -> ec.EllipticCurvePublicKey:
    key = load_ssh_public_key(text.encode())
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("a key is not on an elliptic curve")
    return key


OF_A_PART = 2
"""Objects of a part of a reply: an array, and its first chunk of data."""
PULLS = 64
"""Announced replies to try in one fetch, so that its cost does not grow with the nodes."""
CHECK_SENDERS = 5.0
"""Seconds between checks that the senders of incomplete replies are still connected."""
LARGE = 64 << 20
"""Bytes of messages or replies after which freed memory goes back to the system."""


class SuperLinkInbox(Inbox):
    """Replies through a SuperLink, each as soon as it is complete.

    A SuperLink announces a reply before its objects have arrived. Flower's `pull_messages` waits
    for them one reply after the other, so if a sender dies midway, it blocks all replies behind
    it. This inbox tries to pull the objects sent last; if they are missing, it tries the next
    reply. Where the SuperLink accepts batches, it pulls objects of many replies ahead.

    A SuperLink also keeps messages that their nodes never fetched, each with a model, until the
    run ends. `close` makes it drop them.
    """

    _grid: GrpcGrid

    def __init__(
        self,
        calls: Calls,
        messages: Mapping[str, Message],
        most: Callable[[Message], Most],
        keys: NodeKeys | None = None,
    ) -> None:
        super().__init__(calls.grid, messages, most)
        self._keys = keys
        self._calls = calls
        self._ahead: dict[str, PullObjectResponse] = {}
        self._to_drop: list[ConfirmMessageReceivedRequest] = []
        self._announced: dict[str, ObjectTree] = {}
        """Objects of each incomplete reply, by the id of the message it answers."""
        self._next_check = time.monotonic() + CHECK_SENDERS
        first = next(iter(messages.values()), None)
        self._freed = content_bytes(first.content) if first else 0
        """Bytes of messages and replies that were in memory since freed memory went back."""

    def fetch(self, end: float) -> Iterator[Message]:
        """Yield the replies that are complete; see `Inbox`."""
        if unknown := self.waiting - self._announced.keys():
            request = PullAppMessagesRequest(message_ids=unknown)
            response = self._grid._stub.PullMessages(request)
            for reply, tree in zip(
                response.messages_list, response.message_object_trees, strict=True
            ):
                if self._is_signed(reply):
                    self._announced[reply.metadata.reply_to_message_id] = tree
                else:
                    self._drop(tree.object_id)
        turn = list(islice(self._announced, PULLS))
        for place, message_id in enumerate(turn):
            if time.monotonic() >= end:
                break
            tree = self._announced[message_id]
            if self._calls.are_taken_together() and tree.object_id not in self._ahead:
                self._pull_ahead(turn[place:])
            del self._announced[message_id]
            self._give_back()
            if (answer := self._pull(tree, self._most(self._messages[message_id]))) is None:
                self._announced[message_id] = tree  # to the end of the queue
                continue
            if isinstance(answer, Error):  # may be the SuperLink's own, for a lost node
                self._drop(message_id)
            yield self._reply(message_id, answer)
        self._ahead = {}
        self._drop_now()
        if self._announced and time.monotonic() > self._next_check:
            self._next_check = time.monotonic() + CHECK_SENDERS
            yield from self._lost_senders()

    def forget(self, message_id: str) -> None:
        """Have the SuperLink drop a message, and what has arrived of its reply."""
        super().forget(message_id)
        self._drop(message_id)
        if tree := self._announced.pop(message_id, None):
            self._drop(tree.object_id)

    @property
    def coming(self) -> bool:
        """Whether a reply is announced but incomplete; see `Inbox`."""
        return bool(self._announced)

    def close(self) -> None:
        """Make the SuperLink drop messages and incomplete replies; give freed memory back."""
        for message_id in self.waiting:
            self._drop(message_id)
        for tree in self._announced.values():
            self._drop(tree.object_id)
        self._drop_now()
        self._give_back()

    def _is_signed(self, reply: ProtoMessage) -> bool:
        """Whether a reply comes from its node, and is signed with its key where that is known."""
        message_id, node = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        if not self._is_own(message_id, node, error=reply.HasField("error")):
            return False
        if node == SUPERLINK or self._keys is None or self._keys.accept(reply.metadata):
            return True
        self.rejected.append((self._messages[message_id], "it is not signed with the node's key"))
        return False

    def _pull(self, tree: ObjectTree, most: Most) -> RecordDict | Error | None:
        """Pull a reply that is not too large; None if it is incomplete."""
        if not (parts := _parts_of(tree, most)):
            self._drop(tree.object_id)
            return too_large(most.num_parts, "parts")
        pull_object = _bounded(
            make_pull_object_fn_protobuf(self._pull_object, self._grid.node, self._grid.run.run_id),
            most.num_bytes,
        )
        try:
            contents = pull_objects(parts, pull_object, max_tries_per_object=1)
        except _TooLargeError:
            self._drop(tree.object_id)
            return too_large(most.num_bytes, "bytes")
        except ObjectUnavailableError:
            return None
        except ObjectIdNotPreregisteredError as error:
            return unreadable(error)
        self._drop(tree.object_id)
        self._freed += sum(map(len, contents.values()))
        try:
            return answer_of(inflated(tree.object_id, contents, most.num_bytes))
        except InflationError:
            return too_large(most.num_bytes, "bytes")
        except Exception as error:  # a node may send anything
            return unreadable(error)

    def _give_back(self) -> None:
        """Give freed memory back to the system, if it may be much."""
        if self._freed > LARGE:
            trim_heap()
            self._freed = 0

    def _lost_senders(self) -> Iterator[Message]:
        connected = set(self._grid.get_node_ids())
        for message_id, tree in list(self._announced.items()):
            if self._messages[message_id].metadata.dst_node_id not in connected:
                del self._announced[message_id]
                self._drop(tree.object_id)
                reason = "The node was lost while it sent its reply"
                yield self._reply(message_id, Error(ErrorCode.NODE_UNAVAILABLE, reason))

    def _pull_ahead(self, message_ids: Sequence[str]) -> None:
        """Pull objects of replies that are not too large, as many as fit into a batch."""
        self._ahead = {}
        names: dict[str, None] = {}
        for message_id in message_ids:
            most = self._most(self._messages[message_id])
            names |= dict.fromkeys(_parts_of(self._announced[message_id], most))
        node, run_id = self._grid.node, self._grid.run.run_id
        requests = [PullObjectRequest(node=node, run_id=run_id, object_id=name) for name in names]
        if requests:
            self._ahead = dict(zip(names, self._calls.make(requests), strict=False))

    def _pull_object(self, request: PullObjectRequest) -> PullObjectResponse:
        if (response := self._ahead.get(request.object_id)) is not None:
            return response
        return cast(PullObjectResponse, self._grid._stub.PullObject(request))

    def _drop(self, object_id: str) -> None:
        """Have the SuperLink drop a message or reply, at the end of this fetch at the latest."""
        request = ConfirmMessageReceivedRequest(
            node=self._grid.node, run_id=self._grid.run.run_id, message_object_id=object_id
        )
        self._to_drop.append(request)

    def _drop_now(self) -> None:
        requests, self._to_drop = self._to_drop, []
        self._calls.make_all(requests)


def _parts_of(tree: ObjectTree, most: Most) -> list[str]:
    """Objects of a reply, the last one sent first; empty if they are too many.

    They are its parts, further chunks of large arrays, and the message itself.
    """
    chunks = most.num_bytes // FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    limit = OF_A_PART * (most.num_parts + 1) + chunks
    parts = [part.object_id for part in islice(iterate_object_tree(tree), limit + 1)]
    return parts[::-1] if len(parts) <= limit else []


class _TooLargeError(Exception):
    pass


def _bounded(pull: Callable[[str], bytes], most: int) -> Callable[[str], bytes]:
    """Limit the bytes that a function pulls; beyond them it raises `_TooLargeError`."""
    left = most

    def pull_bounded(object_id: str) -> bytes:
        nonlocal left
        content = pull(object_id)
        left -= len(content)
        if left < 0:
            raise _TooLargeError
        return content

    return pull_bounded
