"""The guard of a node judges what comes to it and what leaves it: events in, verdicts out.

It knows no transport (`flower.guarding` is one). A reply leaves as the guard read
it, without what else the app put beside it. Everything that leaves is in the outbox first.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_distill.base.text import counted
from flwr_distill.links.credentials import Credentials
from flwr_distill.node.account import LifetimeAccount
from flwr_distill.node.budgets import Images, VirtualImages, WordBudget
from flwr_distill.node.bundle import BundleError, check_hash, folder_of_bundles, unpack
from flwr_distill.node.evaluation import (
    blur,
    cost_of,
    drop_details,
    judge_counts,
    judge_evaluation,
)
from flwr_distill.node.events import Answer, Bundle, Header
from flwr_distill.node.outbox import FOLDER, Outbox, OutboxError
from flwr_distill.node.own_data import OwnData
from flwr_distill.node.parcels import Opener, parcels_of, virtual_data_in
from flwr_distill.node.policy import Policy
from flwr_distill.node.raw_data_permissions import raw_data_allowed
from flwr_distill.node.replies import (
    NodeIdentity,
    claimed_epsilon,
    judge_reply,
    purpose_of,
    releases,
)
from flwr_distill.node.requests import Form, MessageRequest, Refusal
from flwr_distill.node.rules import judge_bundle, judge_message, judge_request, judge_spending
from flwr_distill.node.run_records import RunRecordError, RunRecords
from flwr_distill.node.settings import FLOWER_HOME
from flwr_distill.node.statistics import cost_of_statistics, release_statistics
from flwr_distill.protocol.codecs import CodecError
from flwr_distill.protocol.meeting import DESCRIBE, identity, one_line, place_secrets
from flwr_distill.protocol.messages import CONFIG, FINGERPRINT, LINK_ERROR, METRICS
from flwr_distill.protocol.replies import REFUSED, no_handler, reason_of
from flwr_distill.protocol.statistics import ASK_STATISTICS
from flwr_distill.storage.store import NodeStore

_MAX_MODELS = 16
"""Runs whose model's form is cached."""
_MAX_RECORDS = 100
"""Records of a reply that a line of the outbox names."""


@dataclass(frozen=True)
class _Pending:
    """A message that waits for its reply."""

    header: Header
    request: MessageRequest | None
    """None if it was unreadable."""
    data: str
    """The account of the data that it is about."""
    answer: Answer | None
    """What refuses it; nothing else leaves then."""


class Guard:
    """Judges what comes to a node and what leaves it, by the owner's policy.

    Not the node config of a run's context counts, which the app hands back changed, but
    `node_config`. `read_run_config` reads the run config in a bundle, with a run's overrides;
    BundleError if it cannot.
    """

    def __init__(
        self,
        policy: Policy,
        state_dir: Path,
        node_config: Mapping[str, Any],
        read_run_config: Callable[[bytes, dict[str, Any]], Mapping[str, Any]],
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now().astimezone(),
    ) -> None:
        self._data = OwnData(node_config)
        counts = {} if self._data.is_there else {"real_per_virtual": 1}
        self._policy = policy.model_copy(update=counts)
        self._state_dir = state_dir
        self._node_config = node_config
        self._read_run_config = read_run_config
        self._now = now
        self._account = LifetimeAccount(state_dir / "lifetime-epsilon.json")
        self._records = RunRecords(state_dir)
        self._pending: dict[str, _Pending] = {}
        self._words = WordBudget()
        self._models: dict[int, Mapping[str, Form]] = {}
        self._virtual = VirtualImages(self._policy.real_per_virtual)
        self._run_configs: dict[tuple[int, str], Mapping[str, Any]] = {}
        self._unpacked = ""

    @property
    def publishers(self) -> Mapping[str, str] | None:
        """Keys, by id, of those whose bundles alone are opened; None for anyone's."""
        return self._policy.publishers

    @cached_property
    def _outbox(self) -> Outbox:
        return Outbox(self._state_dir / FOLDER)

    def admit(self, header: Header, content: RecordDict, bundle: Bundle) -> Answer | None:
        """Judge a message; return the refusal to answer with, None if the app may have it."""
        request, data = None, ""
        try:
            refusal = self._refused(bundle)
            if refusal is None:  # only then it is opened
                request = self._request(header, content, bundle)
                data = self._account.name_of(self._data.identify(request.run_config))
                refusal = (
                    judge_message(self._policy_for(header), request, self._now())
                    or judge_request(self._policy, request, content)
                    or judge_spending(
                        self._policy,
                        epsilon=self._account.left(data),
                        num_bytes=self._outbox.bytes_of_a_day(self._now()),
                        evaluations=self._account.evaluations(data) + request.evaluates,
                    )
                    or self._note_run(header, request)
                )
            if refusal is None:
                self._unpack(bundle)
        except BundleError as error:
            refusal = Refusal("bundle", f"the app bundle {bundle.name} is refused: {error}")
        except Exception as error:  # whatever a hostile message makes it raise
            refusal = Refusal("policy", f"{type(error).__name__}: {error}")
        return self._open(header, request, data, refusal)

    def refuse_unreadable(self, header: Header, error: Exception) -> Answer:
        """Refuse a message whose objects are unreadable; return the answer."""
        what = error if isinstance(error, CodecError) else type(error).__name__
        refusal = Refusal("policy", f"the message is unreadable ({what})")
        answer = self._open(header, None, "", refusal)
        assert answer is not None
        return answer

    def _open(
        self, header: Header, request: MessageRequest | None, data: str, refusal: Refusal | None
    ) -> Answer | None:
        answer = self._answer(header, refusal) if refusal is not None else None
        # One at a time: the SuperNode waits for a reply before it polls for the next message.
        self._pending = {header.message_id: _Pending(header, request, data, answer)}
        return answer and replace(answer, note=str(refusal))

    def release(self, message_id: str, reply: Answer, num_bytes: int) -> Answer:
        """Judge the reply to a message, of so many bytes; return what leaves in its place.

        LookupError without a pending message of this id.
        """
        try:
            pending = self._pending.pop(message_id)
        except KeyError:
            raise LookupError("reply without a pending request") from None
        try:
            if pending.answer is not None:
                return self._leave(pending, pending.answer)
            if (content := reply.content) is None:
                if pending.request is not None and pending.request.evaluates:
                    self._account.book_evaluation(pending.data, 0.0)  # that it failed is an answer
                if self._policy.replies == "declared":
                    reply = replace(reply, reason=self._words.spend(reply.reason, self._now()))
                if not no_handler(reply.reason):
                    reply = self._named(pending.header, reply)
                return self._leave(pending, reply)
            if self._policy.replies == "declared":  # the node cannot tell it from other bytes
                content.config_records.get(CONFIG, ConfigRecord()).pop(FINGERPRINT, None)
            refusal = self._judge(pending, content, num_bytes)
            if refusal is None:
                self._bound_words(content)
                return Answer(content)
        except OutboxError as problem:
            refusal = Refusal("outbox", "not writable", str(problem))
        except Exception as problem:  # whatever a hostile reply makes it raise
            refusal = Refusal("policy", type(problem).__name__, str(problem))
        answer = self._answer(pending.header, refusal)
        with suppress(OutboxError):  # these are the node's own words
            self._leave(pending, answer)
        return replace(answer, note=f"{refusal}: {one_line(refusal.detail)}")

    def _answer(self, header: Header, refusal: Refusal) -> Answer:
        """The answer that names the rule."""
        return self._named(header, Answer(None, REFUSED, one_line(refusal)))

    def _named(self, header: Header, error: Answer) -> Answer:
        """An error as it is; at the first meeting what is missing, with the node's name."""
        if header.message_type != DESCRIBE:
            return error
        text = reason_of(error.reason)
        metrics, config = identity(self._node_config)
        config_record = ConfigRecord({**config, "missing": [text]})
        return Answer(RecordDict({METRICS: metrics, CONFIG: config_record}))

    def _leave(self, pending: _Pending, answer: Answer) -> Answer:
        text = answer.reason
        if answer.content is not None:
            (text,) = cast(list[str], answer.content.config_records[CONFIG]["missing"])
        self._record(pending, len(text), error=one_line(text))
        return answer

    def _bound_words(self, content: RecordDict) -> None:
        """Bound what the app reports as missing or not sent, as its errors: it is free text."""
        config = content.config_records.get(CONFIG, ConfigRecord())
        if self._policy.replies != "declared":
            return
        if "missing" in config:
            missing = cast(list[str], config["missing"])
            config["missing"] = [self._words.spend(text, self._now()) for text in missing]
        if LINK_ERROR in config:
            config[LINK_ERROR] = self._words.spend(str(config[LINK_ERROR]), self._now())

    def _refused(self, bundle: Bundle) -> Refusal | None:
        """Why a bundle is not opened: by its hash, or because no publisher has signed it.

        Flower's own refusal names no rule, and answers no message that this guard has seen.
        """
        if bundle.content is None:
            return None
        if refusal := judge_bundle(self._policy, bundle.name):
            return refusal
        if self.publishers is None or bundle.signed:
            return None
        reason = f"the app bundle {bundle.name} is signed by none of {', '.join(self.publishers)}"
        return Refusal("publishers", reason)

    def _policy_for(self, header: Header) -> Policy:
        """The policy, with what the owner has allowed this run, not the one that it resumes."""
        if self._policy.raw_data == "ask" and raw_data_allowed(self._state_dir, header.run_id):
            return self._policy.model_copy(update={"raw_data": "allowed"})
        return self._policy

    def _request(self, header: Header, content: RecordDict, bundle: Bundle) -> MessageRequest:
        request = MessageRequest.read(
            content,
            message_type=header.message_type,
            bundle=bundle.name,  # it has been checked
            run_config=self._run_config(header.run_id, bundle),
            model=self._models.get(header.run_id),
        )
        if not request.model:
            request = replace(request, model=self._opener(header).delivered_model(content))
        self._models[header.run_id] = request.model
        if len(self._models) > _MAX_MODELS:
            del self._models[next(iter(self._models))]
        return request

    def _run_config(self, run_id: int, bundle: Bundle) -> Mapping[str, Any]:
        """The config of a run, read once: the bundle is an archive of hundreds of files."""
        if bundle.content is None:
            return bundle.overrides
        check_hash(bundle.content, bundle.name)
        if (run_id, bundle.name) not in self._run_configs:
            config = self._read_run_config(bundle.content, dict(bundle.overrides))
            self._run_configs = {(run_id, bundle.name): config}
        return self._run_configs[run_id, bundle.name]

    def _note_run(self, header: Header, request: MessageRequest) -> Refusal | None:
        """Note the run's bundle and what it resumes: its app sees these runs' files."""
        if self._policy.sandbox == "none":
            return None
        try:
            self._records.note(header.run_id, request.bundle, request.resumes)
        except RunRecordError as error:
            return Refusal("sandbox", str(error))
        return None

    def _unpack(self, bundle: Bundle) -> None:
        if bundle.content is not None and self._unpacked != bundle.name:
            unpack(bundle.content, folder_of_bundles(self._state_dir / FLOWER_HOME))
            self._unpacked = bundle.name

    def _judge(self, pending: _Pending, content: RecordDict, num_bytes: int) -> Refusal | None:
        """Why a reply may not leave. If it may, it is in the outbox. What it costs is booked."""
        header, request = pending.header, pending.request
        assert request is not None
        payloads = self._opener(header).payloads(request, content)
        claim = claimed_epsilon(content)
        run = self._first_run(header)
        policy = self._policy_for(header)
        cost, most = cost_of(policy, request), policy.most_epsilon
        spent = self._account.after(pending.data, run, claim) + cost
        left = math.inf if most is None else most - spent
        cost += judge_counts(policy, request, content, left=left)
        cost += (of_statistics := cost_of_statistics(policy, request))
        # First: what exceeds the account is refused for that alone, whatever is in the reply.
        refusal = judge_spending(
            self._policy,
            epsilon=self._account.after(pending.data, run, claim) + cost,
            num_bytes=self._outbox.bytes_of_a_day(self._now()) + num_bytes,
            counted=claim is not None or not releases(request, content),
            evaluations=self._account.evaluations(pending.data) + request.evaluates,
        )
        if refusal is not None:
            return refusal
        drop_details(policy, request, content)
        if of_statistics:  # that the app's are refused is an answer, too
            self._account.book_statistics(pending.data, of_statistics)
        refusal = release_statistics(
            policy,
            request,
            content,
            samples=self._num_samples(request),
            class_names=self._data.class_names(),
        ) or judge_reply(
            policy,
            request,
            content,
            payloads,
            self._own_words(header, request),
            self._max_classes if policy.classes or policy.counts_classes else None,
        )
        if refusal is not None and request.evaluates:  # as one that fails
            self._account.book_evaluation(pending.data, 0.0)
        refusal = refusal or judge_evaluation(policy, request, content, self._num_samples(request))
        images: Images = {}
        if refusal is None:
            images = self._virtual.with_reply(run, request, payloads)
            refusal = self._virtual.judge(images, self._data.counts()) if images else None
        self._account.book(pending.data, run, claim)  # that it is refused is an answer, too
        if refusal is not None:
            return refusal
        blur(policy, request, content)
        self._virtual.note(run, images)
        if request.evaluates:
            self._account.book_evaluation(pending.data, cost)
        virtual = [self._outbox.keep(p.content) for p in virtual_data_in(payloads)]
        self._record(
            pending,
            num_bytes,
            what=[
                one_line(_described(name, record))
                for name, record in islice(content.items(), _MAX_RECORDS)
            ],
            parcels=[
                {
                    "to": _short(request.route_of(name).get("receiver")),
                    "purpose": one_line(str(purpose_of(request, name))),
                    "link": _short(content.config_records[name].get("link")),
                    "bytes": _short(content.config_records[name].get("num-bytes")),
                }
                for name in parcels_of(content)
            ],
            virtual=virtual,
            classes=self._data.class_names_in(request) if virtual else [],
            epsilon=claim,
            lifetime=self._account.left(pending.data),
        )
        return None

    def _record(self, pending: _Pending, num_bytes: int, **about: Any) -> None:
        header, request = pending.header, pending.request
        phase = request.phase if request else None
        self._outbox.append(
            self._now(),
            num_bytes,
            run=str(header.run_id),
            strategy=one_line(request.strategy) if request else "",
            type=one_line(header.message_type),
            title=phase.title if phase else "",
            data=pending.data,
            **about,
        )

    def _max_classes(self) -> int:
        """Classes that virtual data may show: those that the owner names, else the large ones."""
        if self._policy.classes is not None:
            return len(set(self._policy.classes))
        return sum(count >= self._policy.fewest_of_a_class for count in self._data.counts())

    def _num_samples(self, request: MessageRequest) -> int | None:
        """Samples of the node's data, where a reply may not claim more; None if unknown."""
        bounded = request.evaluates and self._policy.evaluation_epsilon is not None
        bounded = bounded or request.message_type == ASK_STATISTICS
        return sum(self._data.counts()) if bounded and self._data.is_there else None

    def _own_words(self, header: Header, request: MessageRequest) -> NodeIdentity:
        metrics, config = identity(self._node_config)
        credentials = Credentials.of(self._node_config)
        secrets = {}
        if request.message_type == DESCRIBE:  # with these a node shows its places
            resumes = str(request.records.get(CONFIG, {}).get("resumes", ""))
            secrets = place_secrets(self._store(header), resumes)
        return NodeIdentity(
            identity={**metrics, **config},
            class_names=self._data.class_names(),
            certificate=credentials.certificate if credentials else b"",
            address=str(self._node_config.get("peer-address", "")),
            secrets=secrets,
        )

    def _first_run(self, header: Header) -> str:
        """The first of the chain of runs that this one resumes; they share a privacy account."""
        origin = self._store(header).origin
        return f"{origin.folder.parent.name}/{origin.folder.name}"

    def _store(self, header: Header) -> NodeStore:
        return NodeStore.open(self._state_dir, header.run_id, header.node_id)

    def _opener(self, header: Header) -> Opener:
        return Opener(self._state_dir, self._node_config, header.run_id, header.node_id)


def _short(value: object) -> object:
    """A value of a message or a reply for a line of the outbox, which any may be."""
    return value if isinstance(value, int | float | None) else one_line(value)


def _described(name: str, record: object) -> str:
    if isinstance(record, ArrayRecord):
        values = sum(math.prod(array.shape) for array in record.values())
        return f"{name}: {counted(len(record), 'array')}, {values:,} values"
    if isinstance(record, MetricRecord | ConfigRecord):
        return f"{name}: {', '.join(sorted(record))}"
    return name
