"""Secure sums: the server sees the sum of the models that nodes train, and no single one.

Strategies notice nothing: each node's reply is the mean of all, and the weighted mean of equal
models is that mean; all samples are spread evenly over the replies. The protocol is in
`protocol.secure_sums`, its maths in `links.masks`.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from logging import ERROR
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common import log

from flwr_distill.base.text import counted, listed
from flwr_distill.links.credentials import name_of
from flwr_distill.links.masks import MAX_NODES, MIN_NODES, Masked, open_secret, threshold
from flwr_distill.protocol.arrays import Arrays, as_arrays, as_record
from flwr_distill.protocol.meeting import one_line
from flwr_distill.protocol.messages import ARRAYS, METRICS, NUM_EXAMPLES
from flwr_distill.protocol.method import Phase
from flwr_distill.protocol.replies import SET_ASIDE
from flwr_distill.protocol.secure_sums import (
    ANNOUNCE,
    MASKED,
    SECURE,
    SHARE,
    UNMASK,
    Announcement,
    Keys,
    Peers,
    Shares,
    SumRequest,
    Unmasked,
    Unmasking,
    context_of,
    num_masked,
    summed_records,
    told_alike,
)
from flwr_distill.server.grid.pipeline import Pipeline
from flwr_distill.server.grid.screening import Screening
from flwr_distill.server.grid.sums import (
    Blame,
    Sum,
    SumError,
    doubtful,
    liars,
    mask_of,
    max_hostile,
    mean_of,
    refused_keys,
    shares_of,
    unusable_keys,
)
from flwr_distill.task.settings import Block

_ONE_AUTHORITY = "give each node a --peer-certificate of one authority, and a name of its own"


@dataclass
class SecureSums:
    """Replaces the answers to some phases by secure sums.

    A sum continues without the nodes that are lost, at any step, as long as two thirds are left. A
    sum that fails is a phase in which no node sends anything usable.
    """

    screening: Screening
    summed: Collection[str]  # message types
    longest: float  # L2 norm to which nodes shorten a longer update
    run_id: int  # Flower's
    run_config: Mapping[str, Any]  # as nodes have it

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self.blame = Blame()
        """Nodes that sums exclude."""

    def ask(
        self, pipeline: Pipeline, messages: list[Message], timeout: float | None
    ) -> list[Message]:
        """Run a phase of a summed type; each step waits `timeout` seconds, or until the deadline.

        Raises QuorumError if fewer nodes than the quorum sent masked answers.
        """
        phase, num_asked = messages[0].metadata.message_type, len(messages)
        nodes = [message.metadata.dst_node_id for message in messages]
        excluded = self.blame.excluded(nodes, pipeline.round, MIN_NODES)
        replies = [
            _error(pipeline, message, f"secure sums exclude it: {excluded[node]}")
            for message, node in zip(messages, nodes, strict=True)
            if node in excluded
        ]
        messages = [m for m in messages if m.metadata.dst_node_id not in excluded]
        try:
            summed, seconds = self._secure_sum(pipeline, messages, timeout, num_asked)
        except SumError as error:
            summed, seconds = self._failed(pipeline, messages, error), 0.0
        replies += summed
        pipeline.book_phase(phase, seconds, len(messages), replies)
        pipeline.note_answers(phase, replies)
        return replies

    def _secure_sum(
        self, pipeline: Pipeline, messages: list[Message], timeout: float | None, num_asked: int
    ) -> tuple[list[Message], float]:
        """Replies with the mean, and the seconds that masked answers took.

        Raises QuorumError if too few of `num_asked` nodes sent masked answers, and SumError if the
        sum fails before there are any.
        """
        if not MIN_NODES <= len(messages) <= MAX_NODES:
            raise SumError(
                f"{counted(len(messages), 'node')} asked, and it takes {MIN_NODES} to {MAX_NODES} "
                "(start more nodes, lower fraction-train, or set secure-sums to false)"
            )
        records = self._common_records(messages)
        the_sum = self._agreed(pipeline, messages, timeout)
        by_node = {message.metadata.dst_node_id: message for message in messages}
        requests = self._requests(the_sum, by_node)
        received = pipeline.receive(requests, timeout, partial(self._check, num_masked(records)))
        replies = pipeline.settled(received)
        pipeline.check_quorum(received, replies, num_asked)
        masked = {
            reply.metadata.src_node_id: reply.content
            for reply in replies
            if reply.has_content() and MASKED in reply.content.array_records
        }
        others = [reply for reply in replies if reply.metadata.src_node_id not in masked]
        survivors = [place for place in the_sum.members if the_sum.node(place) in masked]
        answering = [message for message in requests if message.metadata.dst_node_id in masked]
        try:
            total = self._unmasked(pipeline, the_sum, survivors, masked, timeout)
            means, numbers, samples = mean_of(total, records, len(survivors))
        except SumError as error:
            return [*self._failed(pipeline, answering, error), *others], received.seconds
        answers, (each, left) = [], divmod(samples, len(survivors))
        for place, message in enumerate(answering):
            own = masked[message.metadata.dst_node_id].metric_records.get(METRICS, MetricRecord())
            metrics = {**own, **numbers, NUM_EXAMPLES: each + (place < left)}
            arrays = {name: as_record(mean) for name, mean in means.items()}
            content = RecordDict({**arrays, METRICS: MetricRecord(metrics)})
            answers.append(Message(content, reply_to=message))
        return [*answers, *others], received.seconds

    def _check(self, size: int | None, message: Message, reply: Message) -> str:
        """Why an answer to a step is rejected, and its sender excluded; empty if it is not.

        A masked answer must have `size` numbers; None is for steps without one.
        """
        reason = self.screening.check(message, reply)
        if not reason and size is not None and MASKED in reply.content.array_records:
            (array,) = reply.content.array_records[MASKED].values()
            if array.shape != (size,):
                reason = f"{MASKED} is {array.shape}, and the sum is of ({size},)"
        if reason:
            node = message.metadata.dst_node_id
            self.blame.lied(node, f"its answer is malformed: {one_line(reason)}")
        return reason

    def _common_records(self, messages: list[Message]) -> Mapping[str, Arrays]:
        """What is summed, by record: the model that all start from, and arrays like others."""
        phase, first = self._phase(messages[0]), messages[0].content
        common = told_alike(first, phase.own)
        missing = phase.summed is None and ARRAYS not in common
        if missing or any(told_alike(m.content, phase.own) != common for m in messages[1:]):
            raise SumError("the strategy does not send all nodes the same model and settings")
        return summed_records(phase, first, self.screening.start_of(messages[0]))

    def _phase(self, message: Message) -> Phase:
        return self.screening.phases[message.metadata.message_type]

    def _agreed(self, pipeline: Pipeline, messages: list[Message], timeout: float | None) -> Sum:
        nodes = [message.metadata.dst_node_id for message in messages]
        peers = self._published(pipeline, next(self._numbers), nodes, timeout)
        published = [int(node) for node in peers.nodes]
        needed = threshold(len(published))
        contents = dict.fromkeys(published, _content_of(peers))
        replies = self._replies(pipeline, SHARE, contents, timeout)
        shares = {}
        for place, node in enumerate(published):
            if node not in replies or SECURE not in replies[node].config_records:
                continue
            shared = Shares.checked(replies[node].config_records[SECURE], SECURE)
            lists = (shared.sealed, shared.key_digests, shared.seed_digests)
            if all(len(each) == len(published) for each in lists):
                shares[place] = shared
            else:
                self.blame.lied(node, "it did not share its secrets with all others")
        refusals = refused_keys(published, replies)
        num_published = counted(len(published), "node")
        for node, count in Counter(node for _, node in refusals).items():
            if count > max_hostile(len(published), needed):
                reason = f"{count} of {num_published} refuse its keys ({_ONE_AUTHORITY})"
                self.blame.lied(node, reason)
        if len(shares) < needed:
            raise SumError(
                f"{len(shares)} of {num_published} shared their secrets, and it needs {needed}",
                {*published} - {*replies} | {node for pair in refusals for node in pair},
            )
        first, most = messages[0], self._max_samples(pipeline, messages)
        context = context_of(
            peers.view(self.run_id),
            first.content,
            self._phase(first),
            self.run_config,
            (self.longest, most),
            self.screening.directory.scale,
        )
        return Sum(peers, context, needed, shares, most)

    def _published(
        self, pipeline: Pipeline, number: int, nodes: list[int], timeout: float | None
    ) -> Peers:
        """Have the nodes publish keys; those that others could not use are dropped."""
        contents = dict.fromkeys(nodes, _content_of(Announcement(number=number)))
        replies = self._replies(pipeline, ANNOUNCE, contents, timeout)
        keys = {
            node: Keys.checked(reply.config_records[SECURE], SECURE)
            for node, reply in replies.items()
        }
        lies = unusable_keys(keys)
        for node, reason in lies.items():
            self.blame.lied(node, reason)
        usable = {node: of_node for node, of_node in keys.items() if node not in lies}
        if len(usable) < threshold(len(nodes)):
            raise SumError(
                f"{len(usable)} of {counted(len(nodes), 'node')} published keys",
                {*nodes} - {*keys},
            )
        return Peers(
            number=number,
            nodes=[str(node) for node in usable],
            names=[name_of(of_node.certificate) for of_node in usable.values()],
            seal_keys=[of_node.seal_key for of_node in usable.values()],
            mask_keys=[of_node.mask_key for of_node in usable.values()],
            commitments=[of_node.commitment for of_node in usable.values()],
            certificates=[of_node.certificate for of_node in usable.values()],
            signatures=[of_node.signature for of_node in usable.values()],
        )

    def _max_samples(self, pipeline: Pipeline, messages: list[Message]) -> int:
        """Most samples of a node that count, as in a run without secure sums; 0 for no bound."""
        if self._phase(messages[0]).averaged == "pool":
            return 0
        nodes = {message.metadata.dst_node_id for message in messages}
        samples = self.screening.directory.samples({*pipeline.nodes.ids(), *nodes})
        return max(samples.values(), default=0)

    def _requests(self, the_sum: Sum, by_node: Mapping[int, Message]) -> list[Message]:
        """The phase's messages, to the members of the sum, with what they need for their masks."""
        messages = []
        for place in the_sum.members:
            node = the_sum.node(place)
            request = SumRequest(
                number=the_sum.peers.number,
                members=the_sum.members,
                sealed=[the_sum.shares[member].sealed[place] for member in the_sum.members],
                longest=self.longest,
                most=the_sum.most,
            )
            content = RecordDict({**by_node[node].content, **_content_of(request)})
            meta = by_node[node].metadata
            messages.append(
                Message(content, node, meta.message_type, ttl=meta.ttl, group_id=meta.group_id)
            )
        return messages

    def _unmasked(
        self,
        pipeline: Pipeline,
        the_sum: Sum,
        survivors: list[int],
        masked: Mapping[int, RecordDict],
        timeout: float | None,
    ) -> Masked:
        """The sum of the survivors' numbers."""
        members, needed = the_sum.members, the_sum.needed
        if len(survivors) < needed:
            raise SumError(
                f"{len(survivors)} of {counted(len(members), 'node')} sent masked models, and it "
                f"needs {needed}",
                {the_sum.node(place) for place in {*members} - {*survivors}},
            )
        content = _content_of(Unmasking(number=the_sum.peers.number, survivors=survivors))
        contents = {the_sum.node(place): content for place in survivors}
        replies = self._replies(pipeline, UNMASK, contents, timeout)
        helpers = {
            place: Unmasked.checked(replies[node].config_records[SECURE], SECURE).shares
            for place in survivors
            if (node := the_sum.node(place)) in replies
        }
        total = np.zeros((), np.uint64)
        for place in survivors:
            (array,) = as_arrays(masked[the_sum.node(place)].array_records[MASKED]).values()
            total = total + array.astype(np.uint64)
        closed, lies = set(), {}
        shares = {place: shares_of(the_sum, place, survivors, helpers) for place in members}
        for place in members:
            if len(shares[place]) < needed:
                closed.add(place)
                continue
            try:
                secret = open_secret(shares[place].values(), needed)
                total -= mask_of(the_sum, place, survivors, secret, total.size)
            except ValueError:
                lies[the_sum.node(place)] = "it shared something else than it published"
        if not closed and not lies:
            return total
        silent = {place for place in survivors if place not in helpers}
        wrong = {(h, m) for m in members for h in helpers if h not in shares[m]}
        lies |= liars(the_sum, wrong)
        for node, reason in lies.items():
            self.blame.lied(node, reason)
        reasons = {the_sum.node(place): "too few shares fit" for place in closed} | lies
        nodes = [f"node {node} ({reason})" for node, reason in sorted(reasons.items())]
        raise SumError(
            f"could not unmask {listed(nodes)}", doubtful(the_sum, closed, silent, wrong, lies)
        )

    def _replies(
        self,
        pipeline: Pipeline,
        message_type: str,
        contents: Mapping[int, RecordDict],
        timeout: float | None,
    ) -> dict[int, RecordDict]:
        """Usable replies of a step by node, in the order of the nodes."""
        messages = [Message(content, node, message_type) for node, content in contents.items()]
        replies = pipeline.ask(messages, timeout, partial(self._check, None)) if messages else []
        return {
            reply.metadata.src_node_id: reply.content for reply in replies if reply.has_content()
        }

    def _failed(
        self, pipeline: Pipeline, messages: list[Message], error: SumError
    ) -> list[Message]:
        """Error replies of nodes whose sum has failed; note who is to blame."""
        reason = f"the secure sum has failed: {error}"
        log(ERROR, "%s: %s", messages[0].metadata.message_type if messages else "", reason)
        self.blame.doubted(error.doubts, pipeline.round, str(error))
        return [_error(pipeline, message, reason) for message in messages]


def _error(pipeline: Pipeline, message: Message, reason: str) -> Message:
    """An error reply of a node that has no part in the sum; the log says why."""
    meta = message.metadata
    pipeline.failures.book(meta.dst_node_id, meta.message_type, reason, "secure sums")
    return Message(Error(SET_ASIDE, reason), reply_to=message)


def _content_of(block: Block) -> RecordDict:
    return RecordDict({SECURE: ConfigRecord(block.model_dump(by_alias=True))})
