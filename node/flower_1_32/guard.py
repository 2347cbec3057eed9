"""The guard of a node: between SuperLink and app, in the SuperNode's process, outside the app's.

A message that the policy refuses is answered with an error that names the rule, and the app never
sees it. A reply is read from what the app handed in, judged, and written anew from what was read:
whatever else the app put beside it does not leave. An evaluation gets noise here, not in the app.
Everything that leaves is in the outbox first.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from logging import WARNING
from pathlib import Path
from typing import Any, cast

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
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
from flwr.supernode.nodestate import NodeState

from flwr_distill.links.credentials import Credentials
from flwr_distill.links.errors import LinkError
from flwr_distill.links.folder import LinkFolder
from flwr_distill.links.records import Delivery, Parcel, Peered, Route
from flwr_distill.links.seal import unseal
from flwr_distill.links.store import NodeStore
from flwr_distill.node.account import DataSet, LifetimeAccount
from flwr_distill.node.asked import Asked, Form, Refusal, table_of
from flwr_distill.node.bundle import BundleError, check_hash, folder_of_bundles, unpack
from flwr_distill.node.evaluation import blur, cost_of, drop_details, judge_evaluation
from flwr_distill.node.flower.app_config import run_config_of
from flwr_distill.node.flower.timing import can_override
from flwr_distill.node.outbox import FOLDER, Outbox, OutboxError
from flwr_distill.node.permissions import raw_data_allowed
from flwr_distill.node.policy import Policy
from flwr_distill.node.replies import (
    OwnWords,
    claimed_epsilon,
    judge_reply,
    model_of_parcel,
    parcels_of,
    purpose_of,
    releases,
    route_of,
    virtual_data,
)
from flwr_distill.node.rules import (
    judge_bundle,
    judge_message,
    judge_request,
    judge_spending,
)
from flwr_distill.node.run_records import RunRecordError, RunRecords
from flwr_distill.node.settings import FLOWER_HOME
from flwr_distill.node.virtual_images import Images, VirtualImages
from flwr_distill.protocol.meeting import DESCRIBE, identity, one_line, place_secrets
from flwr_distill.protocol.messages import CONFIG, DELIVERY, FINGERPRINT, METRICS
from flwr_distill.protocol.replies import REFUSED
from flwr_distill.task.errors import DatasetError
from flwr_distill.task.file_state import read_once
from flwr_distill.task.image_files import class_names
from flwr_distill.task.settings import PrivateSettings, SettingsError
from flwr_distill.task.survey import survey
from flwr_distill.task.words import counted

_POLL = 0.01
_LONGEST_WAIT = 600.0
"""Seconds for an object of a message whose others are here."""
_MOST_MODELS = 16
"""Runs whose model's form is remembered."""
_MOST_WORDS = 10_000
"""Characters of the app's errors that leave in a day: they may quote samples."""
_DAY = datetime.timedelta(days=1)
_MOST_RECORDS = 100
"""Records of a reply that a line of the outbox names."""
_MOST_CLASSES = 100
"""Classes that it names: a run may have ten thousand, with names of its choice."""


@dataclass(frozen=True)
class _Pending:
    """A message that waits for its reply: its header, what it asks and of which data.

    Without `asked` it could not be read. With an answer, which refuses it, nothing else leaves.
    """

    message: Message
    asked: Asked | None
    data: str
    answer: Message | None


class Guard:
    """Judges what comes to a node and what leaves it, by the node's policy.

    Parameters
    ----------
    policy : Policy
        The owner's.
    state_dir : Path
        The node's; holds account and outbox.
    node_config : Mapping[str, bool | int | float | str]
        The node's. That of a run's context is not taken: the app hands the context back changed.
    now : callable, optional
        The node's clock, with its time zone.
    """

    def __init__(
        self,
        policy: Policy,
        state_dir: Path,
        node_config: Mapping[str, Any],
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now().astimezone(),
    ) -> None:
        # Without data of its own a node has a partition of a public set, and nothing to count.
        counts = {} if "data" in node_config else {"real_per_virtual": 1}
        self._policy = policy.model_copy(update=counts)
        self._state_dir = state_dir
        self._node_config = node_config
        self._now = now
        self._account = LifetimeAccount(state_dir / "lifetime-epsilon.json")
        self._records = RunRecords(state_dir)
        self._pending: dict[str, _Pending] = {}
        self._words: list[tuple[datetime.datetime, int]] = []
        self._models: dict[int, Mapping[str, Form]] = {}
        self._virtual = VirtualImages(self._policy.real_per_virtual)
        self._run_configs: dict[tuple[int, str], Mapping[str, Any]] = {}
        self._unpacked = ""
        self._survey = read_once(self._own_files, maxsize=1)(self._count_samples)
        self._identify = read_once(self._own_files, maxsize=1)(self._identify_data)

    @cached_property
    def _outbox(self) -> Outbox:
        return Outbox(self._state_dir / FOLDER)

    def _own_files(self) -> list[Path]:
        return [Path(self._node_config["data"])]

    def _count_samples(self) -> list[int]:
        """Samples of each class of the node's data."""
        (data,) = self._own_files()
        return list(survey(data, decode=False).counts.values())

    def _identify_data(self) -> DataSet:
        (data,) = self._own_files()
        return DataSet.at(data)

    def _data_set(self, run_config: Mapping[str, Any]) -> DataSet:
        """The node's data set."""
        if "data" in self._node_config:
            return self._identify()
        name = self._node_config.get("dataset", run_config.get("dataset", ""))
        own = [self._node_config.get(key, "") for key in ("partition-id", "num-partitions")]
        return DataSet(f"{name} {own[0]}/{own[1]}")

    def _most_classes(self) -> int:
        """Classes that virtual data may show: those that the owner names, else the large ones."""
        if self._policy.classes is not None:
            return len(set(self._policy.classes))
        return sum(count >= self._policy.fewest_of_a_class for count in self._survey())

    def _num_samples(self, asked: Asked) -> int | None:
        """Samples of the node's data, where an evaluation may not claim more; None if unknown."""
        bounded = asked.evaluates and self._policy.evaluation_epsilon is not None
        return sum(self._survey()) if bounded and "data" in self._node_config else None

    def _own_words(self, message: Message, asked: Asked) -> OwnWords:
        metrics, config = identity(self._node_config)
        credentials = Credentials.of(self._node_config)
        return OwnWords(
            identity={**metrics, **config},
            class_names=self._own_class_names(),
            certificate=credentials.certificate if credentials else b"",
            address=str(self._node_config.get("peer-address", "")),
            secrets=self._place_secrets(message, asked),
        )

    def _own_class_names(self) -> list[str]:
        """Names of all classes by the node's images; empty if there are none."""
        try:
            data = self._node_config.get("data")
            return list(class_names(str(data))) if data is not None else []
        except DatasetError:
            return []

    def _class_names(self, asked: Asked) -> list[str]:
        """Names of the run's first classes, as far as the node knows them."""
        if asked.run_config.get("dataset") != "private":
            return []
        try:
            table = table_of(asked.run_config, "private")
            names = PrivateSettings.checked(table, "run config").class_names
        except SettingsError:
            return []
        return list(names or self._own_class_names())[:_MOST_CLASSES]

    def _place_secrets(self, message: Message, asked: Asked) -> dict[str, bytes]:
        """With which the node shows its places, where it is asked who it is."""
        if asked.message_type != DESCRIBE:
            return {}
        run_id, node_id = message.metadata.run_id, message.metadata.dst_node_id
        resumes = str(asked.said_by_record.get(CONFIG, {}).get("resumes", ""))
        return place_secrets(NodeStore.open(self._state_dir, run_id, node_id), resumes)

    def _said(self, words: str) -> str:
        """What leaves of the app's own words: one line, and no more than a bound a day."""
        now, line = self._now(), one_line(words)
        self._words = [(when, size) for when, size in self._words if now - when < _DAY]
        if sum(size for _, size in self._words) + len(line) > _MOST_WORDS:
            return "the app failed, and its words of a day are used up (the node's log says why)"
        self._words.append((now, len(line)))
        return line

    def _bound_words(self, content: RecordDict) -> None:
        """Bound what the app says is missing, as its errors: it is free text, too."""
        config = content.config_records.get(CONFIG, ConfigRecord())
        if self._policy.replies == "declared" and "missing" in config:
            config["missing"] = [self._said(text) for text in cast(list[str], config["missing"])]

    def admit(self, message: Message, run: Run, bundle: Fab) -> Message | None:
        """Judge a message that has come; return the refusal to answer with, None if there is none.

        Parameters
        ----------
        run : Run
            As the SuperLink describes it.
        bundle : Fab
            The app bundle that would answer.
        """
        asked, data = None, ""
        try:
            refusal = self._refused(bundle)
            if refusal is None:  # only then it is opened
                asked = self._asked(message, run, bundle)
                data = self._account.name_of(self._data_set(asked.run_config))
                refusal = (
                    judge_message(self._policy_for(message), asked, self._now())
                    or judge_request(self._policy, asked, message.content)
                    or judge_spending(
                        self._policy,
                        epsilon=self._account.left(data),
                        num_bytes=self._outbox.bytes_of_a_day(self._now()),
                        evaluations=self._account.evaluations(data) + asked.evaluates,
                    )
                    or self._note_run(message, asked)
                )
            if refusal is None:
                self._unpack(bundle)
        except BundleError as error:
            refusal = Refusal("bundle", f"the app bundle {bundle.hash_str} is refused: {error}")
        except Exception as error:  # whatever a hostile message makes it raise
            refusal = Refusal("policy", f"{type(error).__name__}: {error}")
        return self._open(remove_content_from_message(message), asked, data, refusal)

    def refuse_unreadable(self, header: Message, error: Exception) -> Message:
        """Refuse a message that cannot be read from its objects; return the answer."""
        refusal = Refusal("policy", f"the message cannot be read ({type(error).__name__})")
        answer = self._open(header, None, "", refusal)
        assert answer is not None
        return answer

    def _open(
        self, header: Message, asked: Asked | None, data: str, refusal: Refusal | None
    ) -> Message | None:
        """Wait for a message's reply; return the refusal to answer with, if there is one."""
        answer = None
        if refusal is not None:
            log(WARNING, "%s", refusal)
            answer = _answer(header, refusal, self._node_config)
        # One at a time: the SuperNode waits for a reply before it looks for the next message.
        self._pending = {header.metadata.message_id: _Pending(header, asked, data, answer)}
        return answer

    def release(self, reply: Message, num_bytes: int) -> Message:
        """Judge a reply; return what leaves in its place: the same content, or an error.

        Parameters
        ----------
        num_bytes : int
            Size of the reply.

        Raises
        ------
        LookupError
            If it answers nothing that is open.
        """
        try:
            pending = self._pending.pop(reply.metadata.reply_to_message_id)
        except KeyError:
            raise LookupError("a reply of the app to nothing that it was asked") from None
        try:
            if pending.answer is not None:
                return self._leave(pending, pending.answer)
            if reply.has_error():
                if pending.asked is not None and pending.asked.evaluates:
                    self._account.book_evaluation(pending.data, 0.0)  # that it failed is an answer
                text = reply.error.reason or ""
                if self._policy.replies == "declared":
                    text = self._said(text)
                error = Error(reply.error.code, text)
                return self._leave(pending, Message(error, reply_to=pending.message))
            if self._policy.replies == "declared":  # the node cannot tell it from other bytes
                reply.content.config_records.get(CONFIG, ConfigRecord()).pop(FINGERPRINT, None)
            refusal = self._judge(pending, reply, num_bytes)
            if refusal is None:
                self._bound_words(reply.content)
                return Message(reply.content, reply_to=pending.message)
        except OutboxError as problem:
            refusal = Refusal("outbox", "it cannot be written", str(problem))
        except Exception as problem:  # whatever a hostile reply makes it raise
            refusal = Refusal("policy", type(problem).__name__, str(problem))
        log(WARNING, "%s: %s", refusal, one_line(refusal.detail))
        answer = _answer(pending.message, refusal, self._node_config)
        with suppress(OutboxError):  # these are the node's own words
            self._leave(pending, answer)
        return answer

    def _leave(self, pending: _Pending, answer: Message) -> Message:
        """Record an error, and let it leave."""
        text = answer.error.reason if answer.has_error() else _missing(answer)
        self._record(pending, len(text or ""), error=one_line(text or ""))
        return answer

    def config_before_messages(self, bundle: Fab, run: Run) -> dict[str, Any]:
        """The run config that Flower reads before the first message; empty for a refused bundle."""
        try:
            if self._refused(bundle) is None:
                return dict(self._run_config(run, bundle))
        except Exception as error:  # whatever a hostile bundle makes it raise: `admit` refuses it
            log(WARNING, "The app bundle %s cannot be read: %s", bundle.hash_str, one_line(error))
        return {}

    def _refused(self, bundle: Fab) -> Refusal | None:
        """Why a bundle is not opened: by its hash, or because no publisher has signed it.

        Flower would judge signatures too, but its refusal names no rule, and answers no message
        that this guard has seen.
        """
        from flwr.supernode.start_client_internal import _verify_fab

        if refusal := judge_bundle(self._policy, bundle.hash_str):
            return refusal
        publishers = self._policy.publishers
        if publishers is None or _verify_fab(bundle, publishers):
            return None
        reason = f"the app bundle {bundle.hash_str} is signed by none of {', '.join(publishers)}"
        return Refusal("publishers", reason)

    def _policy_for(self, message: Message) -> Policy:
        """The policy, with what the owner has allowed the message's run.

        Not the run that it resumes: which one that is, the app says.
        """
        if self._policy.raw_data == "ask" and raw_data_allowed(
            self._state_dir, message.metadata.run_id
        ):
            return self._policy.model_copy(update={"raw_data": "allowed"})
        return self._policy

    def _asked(self, message: Message, run: Run, bundle: Fab) -> Asked:
        run_id = message.metadata.run_id
        asked = Asked.by(
            message.content,
            message_type=message.metadata.message_type,
            bundle=bundle.hash_str,  # it has been checked
            run_config=self._run_config(run, bundle),
            model=self._models.get(run_id),
        )
        if not asked.model:
            asked = replace(asked, model=self._delivered_model(message))
        self._models[run_id] = asked.model
        if len(self._models) > _MOST_MODELS:
            del self._models[next(iter(self._models))]
        return asked

    def _run_config(self, run: Run, bundle: Fab) -> Mapping[str, Any]:
        """The config of a run, read once: the bundle is an archive of hundreds of files."""
        name = run.run_id, bundle.hash_str
        if name not in self._run_configs:
            check_hash(bundle.content, bundle.hash_str)
            self._run_configs = {name: run_config_of(bundle.content, run.override_config)}
        return self._run_configs[name]

    def _note_run(self, message: Message, asked: Asked) -> Refusal | None:
        """Note the run's bundle and what it resumes: its app gets these runs' files to see."""
        if self._policy.sandbox == "none":
            return None
        try:
            self._records.note(message.metadata.run_id, asked.bundle, asked.resumes)
        except RunRecordError as error:
            return Refusal("sandbox", str(error))
        return None

    def _unpack(self, bundle: Fab) -> None:
        """Unpack a bundle where its app can read it, and no app can write."""
        if self._unpacked != bundle.hash_str:
            unpack(bundle.content, folder_of_bundles(self._state_dir / FLOWER_HOME))
            self._unpacked = bundle.hash_str

    def _judge(self, pending: _Pending, reply: Message, num_bytes: int) -> Refusal | None:
        """Why a reply may not leave. If it may, it is in the outbox. What it costs is booked."""
        asked, content = pending.asked, reply.content
        assert asked is not None
        opened, claim = self._opened(pending.message, asked, content), claimed_epsilon(content)
        run = self._first_run(pending.message)
        policy = self._policy_for(pending.message)
        cost = cost_of(policy, asked)
        # First: what exceeds the account is refused for that alone, whatever is in the reply.
        refusal = judge_spending(
            self._policy,
            epsilon=self._account.after(pending.data, run, claim) + cost,
            num_bytes=self._outbox.bytes_of_a_day(self._now()) + num_bytes,
            counted=claim is not None or not releases(asked, content),
            evaluations=self._account.evaluations(pending.data) + asked.evaluates,
        )
        if refusal is not None:
            return refusal
        drop_details(policy, asked, content)
        refusal = judge_reply(
            policy,
            asked,
            content,
            opened,
            self._own_words(pending.message, asked),
            self._most_classes if policy.classes or policy.counts_classes else None,
        ) or judge_evaluation(policy, asked, content, self._num_samples(asked))
        images: Images = {}
        if refusal is None:
            images = self._virtual.with_reply(run, asked, content, opened)
            refusal = self._virtual.judge(images, self._survey()) if images else None
        if refusal is not None:
            self._account.book(pending.data, run, claim)  # that it is refused is an answer, too
            return refusal
        blur(policy, asked, content)
        self._account.book(pending.data, run, claim)
        self._virtual.note(run, images)
        if asked.evaluates:
            self._account.book_evaluation(pending.data, cost)
        kept = [self._outbox.keep(data) for data in virtual_data(asked, content, opened)]
        self._record(
            pending,
            num_bytes,
            what=[
                one_line(_described(name, record))
                for name, record in islice(content.items(), _MOST_RECORDS)
            ],
            parcels=[
                {
                    "to": route_of(asked, name).get("receiver"),
                    "purpose": one_line(str(purpose_of(asked, name))),
                    "link": record.get("link"),
                    "bytes": record.get("num-bytes"),
                }
                for name, record in content.config_records.items()
                if name in parcels_of(content)
            ],
            virtual=kept,
            classes=self._class_names(asked) if kept else [],
            epsilon=claim,
            lifetime=self._account.left(pending.data),
        )
        return None

    def _record(self, pending: _Pending, num_bytes: int, **about: Any) -> None:
        metadata, asked = pending.message.metadata, pending.asked
        phase = asked.phase if asked else None
        self._outbox.append(
            self._now(),
            num_bytes,
            run=str(metadata.run_id),
            strategy=asked.strategy if asked else "",
            type=metadata.message_type,
            title=phase.title if phase else "",
            data=pending.data,
            **about,
        )

    def _opened(self, message: Message, asked: Asked, content: RecordDict) -> dict[str, bytes]:
        """Payloads of relayed parcels, by record.

        The node's key and the receiver's make the seal's key, so the sender can open it too.
        """
        opened = {}
        credentials = Credentials.of(self._node_config)
        for name in parcels_of(content):
            try:
                route = Route.checked(route_of(asked, name), "route")
                if credentials is not None:
                    credentials.check_peer(route, message.metadata.run_id, route.receiver)
                parcel = Parcel.checked(content.config_records[name], name)
                route.check_size(len(parcel.payload))
                opened[name] = self._unsealed(message, route, parcel.payload)
            except (LinkError, SettingsError):
                continue
        return opened

    def _delivered_model(self, message: Message) -> dict[str, Form]:
        """The form of the model that another node has sent this one, if the message brings it."""
        record = message.content.config_records.get(DELIVERY, ConfigRecord())
        try:
            delivery = Delivery.checked(record, DELIVERY)
            return model_of_parcel(self._unsealed(message, delivery, delivery.payload))
        except (LinkError, SettingsError):
            return {}

    def _unsealed(self, message: Message, waybill: Peered, sealed: bytes) -> bytes:
        run_id, node_id = message.metadata.run_id, message.metadata.dst_node_id
        folder = LinkFolder(NodeStore.open(self._state_dir, run_id, node_id))
        return unseal(sealed, waybill, run_id, folder.private_key())

    def _first_run(self, message: Message) -> str:
        """The first of the chain of runs that this one resumes; they share a privacy account."""
        run_id, node_id = message.metadata.run_id, message.metadata.dst_node_id
        origin = NodeStore.open(self._state_dir, run_id, node_id).origin
        return f"{origin.folder.parent.name}/{origin.folder.name}"


def patch_guard(guard: Guard) -> bool:
    """Put a guard into the SuperNode's loop, after `patch_intake`; False if it does not fit."""
    from flwr.supernode import start_client_internal as loop

    names = ("_pull_and_store_message", "_push_messages", "get_fused_config_from_fab")
    present = all(hasattr(loop, name) for name in names)
    if not can_override("the SuperNode's loop", present):
        return False
    pull, push = loop._pull_and_store_message, loop._push_messages
    fetched: dict[bytes, Fab] = {}

    def pull_and_store_message(
        *, state: Any, object_store: Any, get_fab: Callable[[str, int], Fab], **others: Any
    ) -> int | None:
        def fetch(name: str, run_id: int) -> Fab:
            bundle = get_fab(name, run_id)
            fetched[bundle.content] = bundle
            return bundle

        guarded = cast(NodeState, _GuardedState(state, object_store, guard))
        try:
            return pull(state=guarded, object_store=object_store, get_fab=fetch, **others)
        finally:
            fetched.clear()

    def config_before_messages(content: bytes, run: Run) -> dict[str, Any]:
        return guard.config_before_messages(fetched[content], run)

    def push_messages(
        *,
        state: Any,
        object_store: Any,
        send: Callable[[Message, ObjectTree, float], set[str]],
        push_object: Callable[[int, str, bytes], None],
    ) -> None:
        def send_released(message: Message, tree: ObjectTree, runtime: float) -> set[str]:
            contents = _contents(tree, object_store)
            num_bytes = sum(map(len, contents.values()))
            reply = cast(Message, inflate_object_from_contents(tree.object_id, contents))
            answer = guard.release(reply, num_bytes)
            with no_object_id_recompute():
                answer.metadata.__dict__["_message_id"] = answer.object_id
                objects = get_all_nested_objects(answer)
                needed = send(remove_content_from_message(answer), get_object_tree(answer), runtime)
                push_object_contents_from_iterable(
                    ((name, objects[name].deflate()) for name in needed),
                    partial(push_object, answer.metadata.run_id),
                )
            return set()

        try:
            push(
                state=state, object_store=object_store, send=send_released, push_object=push_object
            )
        except NoObjectInStoreError as error:  # Flower catches none, and the SuperNode would end
            log(WARNING, "A reply of the app is dropped: its objects are another's: %s", error)

    setattr(loop, "_pull_and_store_message", pull_and_store_message)  # noqa: B010 (not exported)
    setattr(loop, "_push_messages", push_messages)  # noqa: B010
    setattr(loop, "get_fused_config_from_fab", config_before_messages)  # noqa: B010
    return True


class _GuardedState:
    """A SuperNode's state that offers a message as a task only if the guard admits it."""

    def __init__(self, state: Any, store: Any, guard: Guard) -> None:
        self._state = state
        self._store = store
        self._guard = guard
        self._message: Message | None = None

    def store_message(self, message: Message) -> Any:
        self._message = message
        return self._state.store_message(message)

    def create_task(self, *, run_id: int, fab_hash: str, **task: Any) -> int | None:
        from flwr.supernode.start_client_internal import _insert_message

        header = self._message
        assert header is not None
        name = header.metadata.message_id
        try:
            contents = _contents(self._store.get_object_tree(name), self._store)
            message = cast(Message, inflate_object_from_contents(name, contents))
            message.metadata.__dict__["_message_id"] = name
        except Exception as error:  # whatever hostile objects make it raise, which ends the node
            header = remove_content_from_message(header)
            refusal: Message | None = self._guard.refuse_unreadable(header, error)
        else:
            run, bundle = self._state.get_run(run_id), self._state.get_fab(fab_hash)
            refusal = self._guard.admit(message, run, bundle)
        if refusal is None:
            created: int | None = self._state.create_task(run_id=run_id, fab_hash=fab_hash, **task)
            return created
        self._store.delete(name)
        self._state.record_message_processing_start(name)
        self._state.record_message_processing_end(name)
        _insert_message(refusal, self._state, self._store)
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def _contents(tree: ObjectTree, store: Any) -> dict[str, bytes]:
    """Contents of a message's objects, once all are there.

    Raises
    ------
    TimeoutError
        If one does not come: the app promised it, and died.
    """
    contents = {}
    for part in iterate_object_tree(tree):
        deadline = time.monotonic() + _LONGEST_WAIT
        while (content := store.get(part.object_id)) == b"":
            if time.monotonic() > deadline:
                raise TimeoutError(f"object {part.object_id} of a message has not come")
            time.sleep(_POLL)
        contents[part.object_id] = content
    return contents


def _answer(message: Message, refusal: Refusal, node_config: Mapping[str, Any]) -> Message:
    """The reply that names the rule: an error, or at the first meeting what is missing."""
    text = one_line(refusal)
    if message.metadata.message_type != DESCRIBE:
        return Message(Error(REFUSED, text), reply_to=message)
    metrics, config = identity(node_config)
    content = RecordDict({METRICS: metrics, CONFIG: ConfigRecord({**config, "missing": [text]})})
    return Message(content, reply_to=message)


def _missing(answer: Message) -> str:
    (text,) = cast(list[str], answer.content.config_records[CONFIG]["missing"])
    return text


def _described(name: str, record: object) -> str:
    """A record in words: what it is called, and how much it holds."""
    if isinstance(record, ArrayRecord):
        values = sum(math.prod(array.shape) for array in record.values())
        return f"{name}: {counted(len(record), 'array')}, {values:,} values"
    if isinstance(record, MetricRecord | ConfigRecord):
        return f"{name}: {', '.join(sorted(record))}"
    return name
