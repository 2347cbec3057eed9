"""Puts the guard (`node.guard`) between SuperLink and app, in the SuperNode's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from logging import WARNING
from typing import Any, cast

from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common import log
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    push_object_contents_from_iterable,
)
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.run import Run

from flwr_distill.flower.loop import Step, WrappedState, answer
from flwr_distill.flower.timing import can_override
from flwr_distill.node.events import Answer, Bundle, Header
from flwr_distill.node.guard import Guard
from flwr_distill.protocol.meeting import one_line

_POLL = 0.01
_LONGEST_WAIT = 600.0
"""Seconds for an object of a message whose other objects have arrived."""


class Guarding(Step):
    """Has a guard judge the messages and replies of a SuperNode's loop."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._headers: dict[str, Message] = {}
        self._fetched: dict[bytes, Fab] = {}

    def patch_run_config(self) -> bool:
        """Have Flower read no run config from a bundle that the guard refuses."""
        from flwr.supernode import start_client_internal as loop

        name = "get_fused_config_from_fab"
        if not can_override("how a SuperNode reads bundles", hasattr(loop, name)):
            return False
        setattr(loop, name, self._run_config)
        return True

    def pull(self, inner: Callable[..., int | None], **named: Any) -> int | None:
        """Pull a message, and offer it to the app only if the guard admits it."""
        get_fab: Callable[[str, int], Fab] = named["get_fab"]

        def fetch(name: str, run_id: int) -> Fab:
            bundle = get_fab(name, run_id)
            self._fetched[bundle.content] = bundle
            return bundle

        state = _GuardedState(named["state"], named["object_store"], self)
        try:
            return inner(**{**named, "state": state, "get_fab": fetch})
        finally:
            self._fetched.clear()

    def push(self, inner: Callable[..., None], **named: Any) -> None:
        """Push the guard's answer in place of the app's reply, encoded again."""
        store, send, push_object = (named[k] for k in ("object_store", "send", "push_object"))

        def send_released(message: Message, tree: ObjectTree, runtime: float) -> set[str]:
            contents = _contents(tree, store)
            num_bytes = sum(map(len, contents.values()))
            reply = cast(Message, inflate_object_from_contents(tree.object_id, contents))
            released = self.release(reply, num_bytes)
            with no_object_id_recompute():
                released.metadata.__dict__["_message_id"] = released.object_id
                objects = get_all_nested_objects(released)
                header, parts = remove_content_from_message(released), get_object_tree(released)
                needed = send(header, parts, runtime)
                push_object_contents_from_iterable(
                    ((name, objects[name].deflate()) for name in needed),
                    partial(push_object, released.metadata.run_id),
                )
            return set()

        try:
            inner(**{**named, "send": send_released})
        except NoObjectInStoreError as error:  # uncaught by Flower, it would end the SuperNode
            log(WARNING, "The app's reply is dropped: it has objects of another message: %s", error)

    def admit(self, message: Message, run: Run, bundle: Fab) -> Message | None:
        """Have the guard judge a message for an app bundle; return its refusal, if any."""
        header = remove_content_from_message(message)
        verdict = self._guard.admit(_header(header), message.content, self._bundle(bundle, run))
        return self._await(header, verdict)

    def refuse_unreadable(self, header: Message, error: Exception) -> Message:
        """Refuse a message that cannot be read from its objects; return the answer."""
        refusal = self._await(header, self._guard.refuse_unreadable(_header(header), error))
        assert refusal is not None
        return refusal

    def release(self, reply: Message, num_bytes: int) -> Message:
        """Have the guard judge a reply of so many bytes; return what is sent in its place.

        Raises LookupError without a pending request.
        """
        name = reply.metadata.reply_to_message_id
        if reply.has_error():
            proposed = Answer(None, reply.error.code, reply.error.reason or "")
        else:
            proposed = Answer(reply.content)
        verdict = self._guard.release(name, proposed, num_bytes)
        return _message(verdict, self._headers.pop(name))

    def _await(self, header: Message, verdict: Answer | None) -> Message | None:
        self._headers = {header.metadata.message_id: header}  # one at a time, as in the guard
        return None if verdict is None else _message(verdict, header)

    def _run_config(self, content: bytes, run: Run) -> dict[str, Any]:
        """The run config that Flower reads before the first message; empty for a refused bundle."""
        bundle = self._fetched[content]
        try:
            return dict(self._guard.run_config(run.run_id, self._bundle(bundle, run)))
        except Exception as error:  # a hostile bundle may raise any: `admit` refuses it
            log(WARNING, "The app bundle %s cannot be read: %s", bundle.hash_str, one_line(error))
        return {}

    def _bundle(self, bundle: Fab, run: Run) -> Bundle:
        publishers = self._guard.publishers
        signed = publishers is not None and _is_signed(bundle, publishers)
        return Bundle(bundle.hash_str, bundle.content, signed, run.override_config)


class _GuardedState(WrappedState):
    """Offers a message as a task only if the guard admits it."""

    def __init__(self, state: Any, store: Any, guarding: Guarding) -> None:
        super().__init__(state)
        self._store = store
        self._guarding = guarding
        self._message: Message | None = None

    def store_message(self, message: Message) -> Any:
        self._message = message
        return self._state.store_message(message)

    def create_task(self, *, run_id: int, fab_hash: str, **task: Any) -> int | None:
        header = self._message
        assert header is not None
        name = header.metadata.message_id
        try:
            contents = _contents(self._store.get_object_tree(name), self._store)
            message = cast(Message, inflate_object_from_contents(name, contents))
            message.metadata.__dict__["_message_id"] = name
        except Exception as error:  # hostile objects may raise any, which would end the node
            header = remove_content_from_message(header)
            refusal: Message | None = self._guarding.refuse_unreadable(header, error)
        else:
            run, bundle = self._state.get_run(run_id), self._state.get_fab(fab_hash)
            refusal = self._guarding.admit(message, run, bundle)
        if refusal is None:
            created: int | None = self._state.create_task(run_id=run_id, fab_hash=fab_hash, **task)
            return created
        answer(refusal, self._state, self._store)
        return None


def _header(message: Message) -> Header:
    metadata = message.metadata
    return Header(metadata.message_id, metadata.message_type, metadata.run_id, metadata.dst_node_id)


def _message(verdict: Answer, header: Message) -> Message:
    """A verdict as Flower's reply to a message; logs its note."""
    if verdict.note:
        log(WARNING, "%s", verdict.note)
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


def _contents(tree: ObjectTree, store: Any) -> dict[str, bytes]:
    """Contents of a message's objects, once all are there; TimeoutError if the app has died."""
    contents = {}
    for part in iterate_object_tree(tree):
        deadline = time.monotonic() + _LONGEST_WAIT
        while (content := store.get(part.object_id)) == b"":
            if time.monotonic() > deadline:
                raise TimeoutError(f"object {part.object_id} of a message has not arrived")
            time.sleep(_POLL)
        contents[part.object_id] = content
    return contents
