"""The node's guard between Flower's messages and the app."""

from __future__ import annotations

from collections.abc import Mapping
from logging import WARNING

from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common import log
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run

from flwr_distill.node.events import Answer, Bundle, Header
from flwr_distill.node.guard import Guard
from flwr_distill.protocol.meeting import Notice, one_line
from flwr_distill.protocol.messages import NOTICE
from flwr_distill.protocol.replies import reason_of


class Guarding:
    """Has a guard judge messages and replies, one message at a time."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._header: Message | None = None
        self._refused = False

    def hear(self, message: Message) -> bool:
        """Take what the server says of this node out of a message, and log it; whether it did.

        SettingsError if it is malformed.
        """
        record = message.content.config_records.get(NOTICE)
        if record is None:
            return False
        del message.content[NOTICE]
        for text in Notice.checked(record, NOTICE).texts:
            _log(message, f"the server says: {text}")
        return True

    def admit(self, message: Message, run: Run, bundle: Fab) -> Message | None:
        """Judge a message for an app bundle; return the refusal, if any, which `release` takes."""
        header = self._await(message)
        verdict = self._guard.admit(_header(header), message.content, self._bundle(bundle, run))
        self._refused = verdict is not None
        return None if verdict is None else _message(verdict, header)

    def refuse_unreadable(self, header: Message, error: Exception) -> Message:
        """Refuse a message that cannot be decoded; return the refusal, which `release` takes."""
        header, self._refused = self._await(header), True
        return _message(self._guard.refuse_unreadable(_header(header), error), header)

    def release(self, reply: Message, num_bytes: int) -> Message:
        """Judge the reply to the message, of so many bytes; return what leaves in its place.

        LookupError if no message is waiting for one.
        """
        if self._header is None:
            raise LookupError("reply without a pending request")
        header, self._header = self._header, None
        if reply.has_error():
            proposed = Answer(None, reply.error.code, reply.error.reason or "")
            if not self._refused:
                _log(header, f"the app failed: {reason_of(reply.error.reason)}")
        else:
            proposed = Answer(reply.content)
        verdict = self._guard.release(header.metadata.message_id, proposed, num_bytes)
        return _message(verdict, header)

    def _await(self, message: Message) -> Message:
        self._header = remove_content_from_message(message)
        return self._header

    def _bundle(self, bundle: Fab, run: Run) -> Bundle:
        publishers = self._guard.publishers
        signed = publishers is not None and _is_signed(bundle, publishers)
        return Bundle(bundle.hash_str, bundle.content, signed, run.override_config)


def _header(message: Message) -> Header:
    metadata = message.metadata
    return Header(metadata.message_id, metadata.message_type, metadata.run_id, metadata.dst_node_id)


def _log(header: Message, text: str) -> None:
    metadata = header.metadata
    log(WARNING, "Run %d, %s: %s", metadata.run_id, metadata.message_type, text)


def _message(verdict: Answer, header: Message) -> Message:
    """A verdict as Flower's reply to a message; logs its note."""
    if verdict.note:
        _log(header, verdict.note)
    if verdict.content is None:
        return Message(Error(verdict.code, verdict.reason), reply_to=header)
    return Message(verdict.content, reply_to=header)


def _is_signed(bundle: Fab, publishers: Mapping[str, str]) -> bool:
    from flwr.supernode.start_client_internal import _verify_fab

    try:
        return bool(_verify_fab(bundle, dict(publishers)))
    except Exception as error:  # hostile signatures may raise any
        log(WARNING, "Signatures of the app bundle cannot be read: %s", one_line(error))
        return False
