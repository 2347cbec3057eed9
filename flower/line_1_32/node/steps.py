"""Steps of a SuperNode's loop: spacing of polls, ends of runs, and the guard (`node.guard`).

Flower does not tell nodes that a run has ended. It only refuses to describe such a run, so the
SuperNode asks now and then about the run that its app works for, and about those with files of
links here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from logging import DEBUG, INFO, WARNING
from pathlib import Path
from typing import Any, cast

from flwr.app import ConfigRecord, Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common import log
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    get_object_type_from_object_content,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    push_object_contents_from_iterable,
)
from flwr.supercore.object_store import NoObjectInStoreError
from flwr.supercore.run import Run, RunNotRunningException

from flwr_distill.flower.overrides import Step, WrappedState, answer, can_override
from flwr_distill.links.folder import remove_links, runs_with_links
from flwr_distill.node.events import Answer, Bundle, Header
from flwr_distill.node.guard import Guard
from flwr_distill.node.kernel import trim_heap
from flwr_distill.node.pace import Pace
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import POLL_EVERY

SMALL_RECORD = 256
"""Bytes of an object beyond which it is not a record about the pace."""


class Spacing(Step):
    """Lets the server space this node's polls, by a record in a message.

    Without one in a message, the node polls at its own pace.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def pull(self, inner: Callable[..., int | None], **named: Any) -> int | None:
        """Pull a message, and read how it spaces polls."""
        reading = ReadingPull(named["pull_object"])
        if (run_id := inner(**{**named, "pull_object": reading})) is not None:
            self._pace.space(reading.spacing)
        return run_id


class ReadingPull:
    """Pulls a message's objects; `spacing` is what they set as seconds between polls, else 0."""

    def __init__(self, pull_object: Callable[[int, str], bytes]) -> None:
        self._pull_object = pull_object
        self.spacing = 0.0

    def __call__(self, run_id: int, object_id: str) -> bytes:
        """Pull an object."""
        content = self._pull_object(run_id, object_id)
        if (
            len(content) <= SMALL_RECORD
            and get_object_type_from_object_content(content) == ConfigRecord.__name__
        ):
            seconds = ConfigRecord.inflate(content).get(POLL_EVERY)
            self.spacing = seconds if isinstance(seconds, float) else self.spacing
        return content


EVERY = 60.0
"""Seconds between questions to the SuperLink, jittered so that nodes do not ask all at once."""
EVERY_AT_WORK = 15.0
"""Seconds between questions while the app works for a run, jittered."""
MAX_QUESTIONS = 50
"""Questions at a time: a hostile app can make folders for any number of runs."""


class RunEnds(Step):
    """Removes the links' files of runs that have ended."""

    def __init__(self, state_dir: Path, *, every: float = EVERY) -> None:
        self._state_dir = state_dir
        self._every = every
        self._due = time.monotonic() + every * random.uniform(0.5, 1.0)

    def pull(self, inner: Callable[..., int | None], **named: Any) -> int | None:
        """Remove them now and then, before a message is pulled."""
        if time.monotonic() > self._due:
            remove_links_of_ended_runs(self._state_dir, named["get_run"])
            trim_heap()  # of a run's bundles and messages
            self._due = _next(self._every)
        return inner(**named)


class StoppedRuns(Step):
    """Ends the app's work for a run that has ended, as when a user stops it.

    Flower's SuperNode waits for the app, even for hours, and drops the reply. Here the message is
    answered with an error, and its task ends: `flower.executor` then ends the app.
    """

    def __init__(self, *, every: float = EVERY_AT_WORK) -> None:
        self._every = every
        self._work: _Work | None = None

    def pull(self, inner: Callable[..., int | None], **named: Any) -> int | None:
        """Pull a message; keep it, and how to ask for its run."""
        self._work = _Work(named["state"], named["get_run"], self._every)
        return inner(**{**named, "state": self._work})

    def push(self, inner: Callable[..., None], **named: Any) -> None:
        """Wait for the reply, or the end of the run."""
        assert self._work is not None
        self._work.object_store = named["object_store"]
        inner(**{**named, "state": self._work})


class _Work(WrappedState):
    """Answers with an error once the message's run has ended."""

    object_store: Any

    def __init__(self, state: Any, get_run: Callable[[int], Any], every: float) -> None:
        super().__init__(state)
        self._get_run = get_run
        self._every = every
        self._due = 0.0
        self._message: Message | None = None

    def store_message(self, message: Message) -> Any:
        self._message = message
        self._due = _next(self._every)
        return self._state.store_message(message)

    def get_messages(self, *, is_reply: bool | None = None, **filters: Any) -> Any:
        replies = self._state.get_messages(is_reply=is_reply, **filters)
        if replies or not is_reply or self._message is None or time.monotonic() < self._due:
            return replies
        self._due = _next(self._every)
        if not _has_ended(self._message.metadata.run_id, self._get_run):
            return replies
        self._end(self._message)
        return self._state.get_messages(is_reply=is_reply, **filters)

    def _end(self, message: Message) -> None:
        run_id = message.metadata.run_id
        log(INFO, "Run %s has ended: the app's work for it ends", run_id)
        for task in self._state.get_tasks(run_ids=[run_id]):
            self._state.finish_task(task.task_id, SubStatus.STOPPED, "the run has ended")
        error = Error(ErrorCode.CLIENT_APP_CRASHED, "the run has ended")
        answer(Message(error, reply_to=message), self._state, self.object_store)


def _next(every: float) -> float:
    return time.monotonic() + every * random.uniform(0.8, 1.2)


def _has_ended(run_id: int, get_run: Callable[[int], Any]) -> bool:
    try:
        get_run(run_id)
    except RunNotRunningException:
        return True
    except Exception as error:  # the SuperLink cannot say: it may later
        log(DEBUG, "Run %s: %s", run_id, error)
    return False


def remove_links_of_ended_runs(state_dir: Path, get_run: Callable[[int], Any]) -> None:
    """Remove keys, spent tokens and uncollected parcels of runs that have ended.

    `get_run` asks the SuperLink to describe a run, and raises RunNotRunningException if it has
    ended.
    """
    for run_id in runs_with_links(state_dir, MAX_QUESTIONS):
        if _has_ended(run_id, get_run):
            log(INFO, "Run %s has ended: its links are removed", run_id)
            remove_links(state_dir, run_id)


_POLL = 0.01
_MAX_WAIT = 600.0
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
        deadline = time.monotonic() + _MAX_WAIT
        while (content := store.get(part.object_id)) == b"":
            if time.monotonic() > deadline:
                raise TimeoutError(f"object {part.object_id} of a message has not arrived")
            time.sleep(_POLL)
        contents[part.object_id] = content
    return contents
