"""Secure sums between the server's grid and nodes: the mean is right, no single update is seen."""

import itertools
import json
import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from benchmarks.in_process import InProcessGrid
from flwr_distill.client.app import MethodApp
from flwr_distill.client.secure_sums import FOLDER, STATE
from flwr_distill.client.session import keep_scale, store_of
from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.node_request import request_node
from flwr_distill.links.masks import digest, open_secret, quantised
from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.protocol.messages import ARRAYS, METRICS, NUM_EXAMPLES
from flwr_distill.protocol.registry import find_method, phases_of
from flwr_distill.protocol.secure_sums import (
    ANNOUNCE,
    MASKED,
    SECURE,
    SHARE,
    UNMASK,
    keys_digest,
    num_masked,
)
from flwr_distill.server.grid.pipeline import QuorumError
from flwr_distill.server.grid.secure_sums import SecureSums
from flwr_distill.server.grid.sums import mask_of, mean_of
from flwr_distill.server.record.journal import Journal
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.fedlgd.method import (
    GRADIENT,
    NEEDS_GLOBAL_DATA,
    VIRTUAL,
    VirtualTraining,
)
from flwr_distill.strategies.hfldd.method import NUM_PARCELS
from flwr_distill.task.columns import Scale
from tests.errors import at
from tests.grids import screening_grid
from tests.odd_certificates import ODD, odd_certificate
from tests.server.run_folder import journal as journal_of

RUN, FIRST = 7, 2**64 - 50
CONFIG = {"strategy": "fedavg", "secure-sums": True}
START = {
    "weight": np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6),
    "running_var": np.full(4, 1e-9, np.float32),
    "num_batches_tracked": np.array(3, np.int64),
}
STEPS = [ANNOUNCE, SHARE, "train", UNMASK]


def update_of(node):
    """What a node has trained, and on how many samples."""
    draws = np.random.default_rng(node)
    model = {
        "weight": START["weight"] + draws.normal(0, 0.3, (4, 6)).astype(np.float32),
        "running_var": draws.uniform(0, 1e-9, 4).astype(np.float32),
        "num_batches_tracked": np.array(5, np.int64),
    }
    return model, int(draws.integers(1, 2000))


def untampered(node, step, reply):
    return reply


class Federation:
    """Nodes that run the real ClientApp around a training that is made up.

    `tamper` may change what a node sends, or lose it (None); `lie` what it gets. `extra` are the
    array records that answers hold besides the model, by node; `told` are more of their metrics.
    """

    def __init__(
        self,
        folder,
        num_nodes,
        *,
        start=START,
        update=update_of,
        node_config=lambda node: {},
        strategy="fedavg",
        asks=(),
        extra=lambda node: {},
        told=(),
        longest=1000.0,
        **more,
    ):
        self.folder, self.start, self.update, self.extra = folder, start, update, extra
        self.told, self.rounds = dict(told), itertools.count(1)
        method = find_method(strategy)
        (self.message_type,) = method.summed
        self.asks = RecordDict(dict(asks))
        run_config = {**CONFIG, "strategy": strategy}
        self.tamper, self.lie = untampered, lambda node, step, content: None
        self.seen, self.asked, self.apps, self.contexts = {}, [], {}, {}
        for node in range(num_nodes):
            config = {"state-dir": str(folder), **node_config(node)}
            self.contexts[node] = Context(
                RUN, FIRST + node, config, RecordDict(), run_config.copy()
            )
            self.apps[node] = self._app(node)
        self.run_config, self.directory = run_config, Directory()
        self.grid = screening_grid(
            InProcessGrid({FIRST + n: self._node(n) for n in range(num_nodes)}),
            **{"norm_threshold": 0.0, **more},
            phases=phases_of(method, secure_sums=True),
            directory=self.directory,
            model=start,
            summed={
                "summed": method.summed,
                "longest": longest,
                "run_id": RUN,
                "run_config": run_config,
            },
        )

    def _app(self, node):
        app = MethodApp()
        handler = app._handler

        def train(message, context):
            model, samples = self.update(node)
            metrics = {
                NUM_EXAMPLES: samples,
                "train-loss": node / 4,
                "dp-epsilon": 0.5,
                **self.told,
            }
            extra = {name: as_record(arrays) for name, arrays in self.extra(node).items()}
            content = {ARRAYS: as_record(model), METRICS: MetricRecord(metrics), **extra}
            return Message(RecordDict(content), reply_to=message)

        def trains(message, context):
            own = message.metadata.message_type == self.message_type
            return train if own else handler(message, context)

        app._handler = trains
        return app

    def _node(self, node):
        def answer(message):
            step = message.metadata.message_type
            step = "train" if step == self.message_type else step
            self.asked.append((node, step))
            self.lie(node, step, message.content)
            reply = self.apps[node](message, self.contexts[node]).content
            reply = self.tamper(node, step, reply)
            if reply is None:
                raise RuntimeError("lost")
            self.seen[node, step] = reply
            return reply

        return answer

    def ask(self, node, step, **values):
        """A message of a server that goes its own way."""
        content = RecordDict({SECURE: ConfigRecord(values)})
        message = Message(content, FIRST + node, step)
        message.metadata.__dict__["_message_id"] = "x"
        return self.apps[node](message, self.contexts[node]).content

    def train(self, nodes=None):
        config = ConfigRecord({"lr": 0.1, "server-round": 1})
        content = {ARRAYS: as_record(self.start), "config": config, **self.asks}
        self.grid.begin_round(next(self.rounds))
        self.asked.clear()
        return self.grid.send_and_receive(
            Message(RecordDict(content), FIRST + node, self.message_type)
            for node in (self.apps if nodes is None else nodes)
        )

    def fails(self):
        """Whether a round ends without any usable reply."""
        return all(reply.has_error() for reply in self.train())

    def in_sum(self):
        """Nodes that the last sum began with."""
        return {node for node, step in self.asked if step == ANNOUNCE}

    def state(self, node):
        return self.folder / "runs" / str(RUN) / str(FIRST + node) / FOLDER / STATE


def losing(lost):
    """Have nodes drop out at a step each."""
    return lambda node, step, reply: None if lost.get(node) == step else reply


def changing(node, step, **values):
    """Change what a node sends for secure sums at a step; a function gets the record."""

    def tamper(sender, at, reply):
        if (sender, at) == (node, step):
            record = reply[SECURE]
            for key, value in values.items():
                record[key.replace("_", "-")] = value(record) if callable(value) else value
        return reply

    return tamper


VIRTUAL_TRAINING = VirtualTraining(per_class=1, first_steps=1, gradient=["weight"])
FEDLGD = {
    "strategy": "fedlgd",
    "asks": {VIRTUAL: ConfigRecord(VIRTUAL_TRAINING.model_dump(by_alias=True))},
    "extra": lambda node: {GRADIENT: {"weight": gradient_of(node)}},
}
"""A round of FedLGD in which nodes send gradients."""
HEADS = {"strategy": "hfldd", "told": {NUM_PARCELS: 2}}
"""A round of HFLDD's heads."""


def gradient_of(node):
    return np.random.default_rng(100 + node).normal(0, 0.01, (4, 6)).astype(np.float32)


def check_gradient(replies, nodes):
    weights = [update_of(node)[1] for node in nodes]
    wanted = np.average([gradient_of(node).astype(np.float64) for node in nodes], 0, weights)
    for reply in replies:
        if reply.has_content():
            gradient = as_arrays(reply.content[GRADIENT])
            assert list(gradient) == ["weight"]
            assert gradient["weight"].dtype == np.float32
            np.testing.assert_allclose(gradient["weight"], wanted, rtol=1e-6, atol=1e-8)


@pytest.fixture
def federation(tmp_path, monkeypatch):
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # Flower does it for each record
    return lambda num_nodes, **more: Federation(tmp_path, num_nodes, **more)


def plain_mean(nodes):
    models, weights = zip(*map(update_of, nodes), strict=True)
    return {
        name: np.average([model[name].astype(np.float64) for model in models], 0, weights)
        for name in START
    }


def check_mean(replies, nodes):
    assert [reply.metadata.src_node_id for reply in replies if reply.has_content()] == [
        FIRST + node for node in nodes
    ]
    wanted = plain_mean(nodes)
    for reply in replies:
        if reply.has_content():
            model = as_arrays(reply.content[ARRAYS])
            for name, array in model.items():
                assert array.dtype == START[name].dtype
                np.testing.assert_allclose(array, wanted[name], rtol=1e-6, atol=1e-7)
            assert (model["running_var"] >= 0).all()


@pytest.mark.parametrize("num_nodes", [3, 8])
def test_every_reply_is_the_mean_weighted_by_samples(federation, num_nodes):
    nodes = range(num_nodes)
    replies = federation(num_nodes).train()
    check_mean(replies, nodes)
    weights = [update_of(node)[1] for node in nodes]
    metrics = replies[0].content[METRICS]
    assert metrics["train-loss"] == pytest.approx(np.average([n / 4 for n in nodes], None, weights))
    assert metrics[NUM_EXAMPLES] == pytest.approx(np.mean(weights), abs=1)
    assert metrics["dp-epsilon"] == 0.5


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="fedavg"),
        pytest.param(HEADS, id="hfldd", marks=pytest.mark.matrix),
        pytest.param(FEDLGD, id="fedlgd", marks=pytest.mark.matrix),
    ],
)
def test_two_of_ten_nodes_that_drop_at_any_step_cost_the_round_nothing(federation, settings, step):
    ten = federation(10, **settings)
    ten.tamper = losing({2: step, 7: step})
    replies = ten.train()
    left = [n for n in range(10) if n not in (2, 7) or step == UNMASK]
    check_mean(replies, left)
    if settings is FEDLGD:
        check_gradient(replies, left)


def test_a_node_that_says_why_it_has_not_trained_costs_no_sum(federation):
    """One that has lost the server's virtual data gets them again."""
    four = federation(4, **FEDLGD)
    missing = {2}
    train = {node: app._handler for node, app in four.apps.items()}

    def says(node):
        def answer(message, context):
            content = RecordDict({METRICS: MetricRecord({NEEDS_GLOBAL_DATA: 1})})
            return Message(content, reply_to=message)

        def handler(message, context):
            own = message.metadata.message_type == four.message_type
            return answer if own and node in missing else train[node](message, context)

        return handler

    for node, app in four.apps.items():
        app._handler = says(node)
    replies = four.train()
    told = {r.metadata.src_node_id - FIRST: r.content for r in replies if r.has_content()}
    assert NEEDS_GLOBAL_DATA in told.pop(2)[METRICS]
    assert told.keys() == {0, 1, 3}
    check_gradient([r for r in replies if r.metadata.src_node_id != FIRST + 2], [0, 1, 3])
    missing |= {3}
    replies = four.train()
    told = {r.metadata.src_node_id - FIRST: r.content for r in replies if r.has_content()}
    assert told.keys() == {2, 3}
    assert four.train() != []
    assert four.in_sum() == {0, 1, 2, 3}


def test_nodes_that_drop_one_after_the_other_cost_nothing_either(federation):
    ten = federation(10)
    ten.tamper = losing({8: ANNOUNCE, 1: SHARE, 4: "train"})
    check_mean(ten.train(), [0, 2, 3, 5, 6, 7, 9])


@pytest.mark.parametrize("step", STEPS)
def test_with_too_few_nodes_the_phase_has_failed_and_says_so(federation, step, caplog):
    six = federation(6)
    six.tamper = losing({3: step, 4: step, 5: step})
    replies = six.train()
    assert len(replies) == 6
    assert all(reply.has_error() for reply in replies)
    assert six.grid.answered["train"] is False
    assert "the secure sum has failed" in caplog.text


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_sum_of_one_or_two_is_refused(federation, num_nodes, caplog):
    few = federation(num_nodes)
    assert few.fails()
    assert "it takes 3 to 100" in caplog.text
    assert few.seen == {}


def test_a_single_update_looks_like_noise_to_the_server(federation):
    """A pattern is planted: what is sent is uniform in every byte, and so are partial sums."""
    size, planted, samples = 25_000, 0.25, 100
    pattern = {"weight": np.full(size, planted, np.float32)}
    three = federation(
        3,
        start={"weight": np.zeros(size, np.float32)},
        update=lambda node: (pattern, samples),
        **{**FEDLGD, "extra": lambda node: {GRADIENT: pattern}},
    )
    replies = three.train()
    for record in (ARRAYS, GRADIENT):
        assert (as_arrays(replies[0].content[record])["weight"] == planted).all()
    masked = {n: as_arrays(three.seen[n, "train"][MASKED])[MASKED][: 2 * size] for n in range(3)}
    of_pairs = [masked[0] + masked[1], masked[0] - masked[1], masked[1] + masked[2]]
    of_all = masked[0] + masked[1] + masked[2]  # the nodes' own masks are still on
    for values in (*masked.values(), *of_pairs, of_all):
        assert chi_squared(values).max() < 255 + 6 * math.sqrt(2 * 255)
    unmasked = quantised(np.full(2 * size, planted), samples)
    assert chi_squared(unmasked).max() > 1e6
    assert not {MASKED, METRICS} ^ set(three.seen[0, "train"])
    assert set(three.seen[0, "train"][METRICS]) == {"dp-epsilon"}


def test_sums_of_two_groups_that_differ_by_a_node_give_its_update_away(federation):
    """What the protocol does not hide, as docs/what-leaves.md says."""
    four = federation(4)
    sums = []
    for nodes in (range(4), range(3)):
        replies = four.train(nodes)
        samples = sum(reply.content[METRICS][NUM_EXAMPLES] for reply in replies)
        mean = as_arrays(replies[0].content[ARRAYS])["weight"].astype(np.float64)
        sums.append((mean * samples, samples))
    model, samples = update_of(3)
    assert sums[0][1] - sums[1][1] == samples
    update = (sums[0][0] - sums[1][0]) / samples
    np.testing.assert_allclose(update, model["weight"], atol=1e-5)


def test_a_server_that_tells_each_node_of_other_losses_gets_the_sum_of_half(
    federation, monkeypatch
):
    """Four of six must be left, as each node sees it. Docs/what-leaves.md says so."""
    six, sums, agreed = federation(6), [], SecureSums._agreed
    monkeypatch.setattr(
        SecureSums, "_agreed", lambda *given: sums.append(agreed(*given)) or sums[0]
    )
    six.lie = lambda node, step, content: step == UNMASK and content.pop(SECURE)
    six.train()
    half, lost = [0, 1, 2], [{3, 4}, {4, 5}, {3, 5}, {4, 5}, {3, 5}, {3, 4}]
    shares = [
        six.ask(node, UNMASK, number=1, survivors=[*{*range(6)} - lost[node]])[SECURE]["shares"]
        for node in range(6)
    ]
    total = sum(as_arrays(six.seen[node, "train"][MASKED])[MASKED] for node in half)
    for place in range(6):
        helpers = [node for node in range(6) if (place in lost[node]) != (place in half)]
        secret = open_secret([shares[node][place] for node in helpers], 4)
        total = total - mask_of(sums[0], place, half, secret, total.size)
    means, _, samples = mean_of(total, {ARRAYS: START}, 3)
    assert samples == sum(update_of(node)[1] for node in half)
    np.testing.assert_allclose(means[ARRAYS]["weight"], plain_mean(half)["weight"], atol=1e-6)


def chi_squared(values):
    """Distance of each of the 8 bytes from the uniform distribution; 255 on average if it is."""
    octets = values.view(np.uint8).reshape(-1, 8)
    expected = len(octets) / 256
    counts = np.stack([np.bincount(column, minlength=256) for column in octets.T])
    return ((counts - expected) ** 2 / expected).sum(1)


def test_nothing_that_the_server_gets_opens_the_masks_of_a_node_that_answered(federation):
    """It gets shares of each secret of one kind, and shares of the other are sealed for nodes."""
    five = federation(5)
    secrets = {}

    def keep(node, step, reply):
        if step == ANNOUNCE:
            secrets[node] = json.loads(five.state(node).read_text())
        return None if (node, step) == (4, "train") else reply

    five.tamper = keep
    five.train()
    told = json.dumps([str(reply) for reply in five.seen.values()])
    for state in secrets.values():
        assert not any(state[key] in told for key in ("seed", "mask_key", "seal_key"))
    after = [five.state(node).read_text() for node in range(4)]
    assert [json.loads(text) for text in after] == [{"number": 1, "step": "over"}] * 4


def test_a_node_helps_once_with_one_kind_of_share_each(federation):
    five = federation(5)
    replies = []
    five.tamper = lambda node, step, reply: replies.append(step) or reply
    five.lie = lambda node, step, content: step == UNMASK and content.pop(SECURE)
    five.train()  # nobody helps: the message is broken
    shares = five.ask(0, UNMASK, number=1, survivors=[0, 1, 2, 3])[SECURE]["shares"]
    told = [five.seen[place, SHARE][SECURE] for place in range(5)]
    kinds = ["seed-digests" if place < 4 else "key-digests" for place in range(5)]
    for own, of_owner, kind in zip(shares, told, kinds, strict=True):
        assert digest(own) == of_owner[kind][0]
    for survivors in ([0, 1, 2, 3], [0, 1, 2, 4]):
        with pytest.raises(RuntimeError, match="each step is taken once"):
            five.ask(0, UNMASK, number=1, survivors=survivors)


@pytest.mark.parametrize(
    ("survivors", "reason"),
    [
        ([0, 1, 2], "3 nodes are in the sum, and 4 must be"),
        ([0, 0, 1, 1, 2], "3 nodes are in the sum, and 4 must be"),
        ([1, 2, 3, 4], "not those of the sum"),
        ([0, 1, 2, 3, 4, 5], "not those of the sum"),
    ],
)
def test_a_server_that_lies_about_who_answered_gets_no_share(federation, survivors, reason):
    five = federation(5)
    five.lie = lambda node, step, content: step == UNMASK and content.pop(SECURE)
    five.train()
    with pytest.raises(RuntimeError, match=reason):
        five.ask(0, UNMASK, number=1, survivors=survivors)


@pytest.mark.parametrize("times", [1, 2])
def test_a_node_adds_no_masks_for_a_sum_of_too_few_nodes(federation, times):
    """Three of five, or three that are said to be six."""
    five = federation(5)

    def lie(node, step, content):
        if step == "train":
            request = content[SECURE]
            members = sorted({node, (node + 1) % 5, (node + 2) % 5}) * times
            sealed = [request["sealed"][request["members"].index(place)] for place in members]
            content[SECURE] = ConfigRecord({**request, "members": members, "sealed": sealed})

    five.lie = lie
    assert five.fails()
    assert "the sum is of 3 nodes, and needs" in str(five.grid.failures)


def test_no_step_of_an_older_sum_is_taken_again(federation):
    four = federation(4)
    four.train()
    peers = {}
    four.lie = lambda node, step, content: peers.setdefault(step, dict(content.get(SECURE, {})))
    four.train()
    for step in (ANNOUNCE, SHARE, UNMASK):
        values = {"survivors": [0, 1, 2, 3]} if step == UNMASK else peers[step]
        for number in (1, 2):
            with pytest.raises(RuntimeError, match=r"sum . is not (newer|announced|masked)"):
                four.ask(0, step, **{**values, "number": number})


def test_a_node_answers_once_under_the_same_masks(federation):
    """Else the difference of two answers would be that of two updates."""
    four = federation(4)
    twice = []

    def again(node, step, content):
        if step == "train" and node == 0 and not twice:
            twice.append(Message(RecordDict(dict(content)), FIRST, "train"))

    four.lie = again
    four.train()
    twice[0].metadata.__dict__["_message_id"] = "again"
    with pytest.raises(RuntimeError, match="sum 1 is not shared"):
        four.apps[0](twice[0], four.contexts[0])


def test_a_node_of_such_a_run_trains_for_no_server_that_leaves_the_masks_out(federation):
    three = federation(3)
    three.lie = lambda node, step, content: step == "train" and content.pop(SECURE)
    assert three.fails()
    assert "asks for a model without masks" in str(three.grid.failures)


@pytest.mark.parametrize(
    "what", ["another model", "lr", "clipping_norm", "a record", "run config", "longest", "most"]
)
def test_a_server_that_makes_the_others_updates_vanish_gets_nothing(federation, what, caplog):
    """Masks of nodes that were told different things do not cancel."""
    four = federation(4)

    def lie(node, step, content):
        if step == "train" and node > 0 and what == "another model":
            content[ARRAYS] = as_record({**START, "weight": np.zeros((4, 6), np.float32)})
        elif step == "train" and node > 0 and what in ("lr", "clipping_norm"):
            content["config"] = ConfigRecord({**content["config"], what: 0.0})
        elif step == "train" and node > 0 and what == "a record":
            content["control-variate"] = as_record({"weight": np.full((4, 6), 1e6)})
        elif step == "train" and node > 0 and what == "run config":
            four.contexts[node].run_config["train.lr"] = 0.0
        elif step == "train" and node > 0:
            content[SECURE] = ConfigRecord({**content[SECURE], what: 1 if what == "most" else 1e-9})

    four.lie = lie
    assert four.fails()
    assert "the masks do not cancel" in caplog.text


def test_a_server_that_scales_the_columns_of_others_to_nothing_gets_nothing(federation, caplog):
    """All values of these nodes were 0, and what was left of the sum was one node's update."""
    table = {"dataset": "private", "private.columns": "age,sex:f|m", "private.classes": "no,yes"}
    three = federation(3)
    three.run_config.update(table)
    for node, context in three.contexts.items():
        context.run_config.update(table)
        keep_scale(store_of(context), Scale((50.0,), (1e30 if node else 9.0,)))
    three.directory.scale = Scale((50.0,), (9.0,))
    assert three.fails()
    assert "masks do not cancel" in caplog.text
    for context in three.contexts.values():
        keep_scale(store_of(context), three.directory.scale)
    check_mean(three.train(), range(3))


def test_wrong_shares_of_a_helper_are_not_used(federation):
    five = federation(5)
    five.tamper = changing(3, UNMASK, shares=[b"x" * 52] * 5)
    check_mean(five.train(), range(5))


def longer_model(node, step, reply):
    if (node, step) == (1, "train"):
        values = np.zeros(num_masked({ARRAYS: START}) + 1, np.uint64)
        reply[MASKED] = ArrayRecord({MASKED: Array(values)})
    return reply


NONSENSE = {
    "low order": changing(1, ANNOUNCE, mask_key=bytes(32)),
    "fewer shares": changing(1, SHARE, sealed=lambda record: record["sealed"][:-1]),
    "longer model": longer_model,
}


@pytest.mark.parametrize("tamper", NONSENSE)
def test_who_answers_a_step_with_nonsense_costs_no_sum_and_is_in_no_further_one(federation, tamper):
    four = federation(4)
    four.tamper = NONSENSE[tamper]
    check_mean(four.train(), [0, 2, 3])
    four.tamper = untampered
    check_mean(four.train(), [0, 2, 3])
    assert four.in_sum() == {0, 2, 3}


@pytest.mark.parametrize("kind", ODD)
def test_a_certificate_that_nobody_can_read_ends_no_run(federation, kind):
    four = federation(4)
    four.tamper = changing(1, ANNOUNCE, certificate=odd_certificate(kind))
    check_mean(four.train(), range(4))


@pytest.mark.parametrize("kind", ODD)
def test_who_sends_such_a_certificate_to_nodes_with_one_is_left_out(
    federation, credentials, kind, caplog
):
    five = federation(5, node_config=credentials.__getitem__)
    five.tamper = changing(1, ANNOUNCE, certificate=odd_certificate(kind))
    assert five.fails()
    assert f"without node {FIRST + 1}: 5 of 5 nodes refuse its keys" in caplog.text


def test_nodes_with_one_key_between_them_cost_no_sum(federation):
    six = federation(6)

    def of_another(record):
        return six.seen[3, ANNOUNCE][SECURE]["mask-key"]

    six.tamper = changing(4, ANNOUNCE, mask_key=of_another)
    check_mean(six.train(), [0, 1, 2, 5])


LATE = {
    "it shared something else": changing(1, ANNOUNCE, commitment=bytes(32)),
    "seals": changing(
        1, SHARE, sealed=lambda record: [each and bytes(150) for each in record["sealed"]]
    ),
    "digests": changing(1, SHARE, seed_digests=[bytes(32)] * 5),
}
"""Nonsense that shows only when masks are opened."""


@pytest.mark.parametrize("tamper", LATE)
def test_who_shares_nonsense_fails_one_sum_by_name_and_is_in_no_further_one(
    federation, tamper, caplog
):
    five = federation(5)
    five.tamper = LATE[tamper]
    assert five.fails()
    assert f"could not unmask node {FIRST + 1}" in caplog.text
    check_mean(five.train(), [0, 2, 3, 4])
    assert five.in_sum() == {0, 2, 3, 4}


def test_a_helper_cannot_have_an_honest_node_left_out(federation, caplog):
    """It denies another's share while a third is lost: nobody can tell which of the two lies."""
    five = federation(5)

    def deny_one(node, step, reply):
        if (node, step) == (4, "train"):
            return None
        if (node, step) == (0, UNMASK):
            shares = reply[SECURE]["shares"]
            reply[SECURE]["shares"] = [shares[0], b"", *shares[2:]]
        return reply

    five.tamper = deny_one
    assert five.fails()
    assert "continue without node" not in caplog.text
    five.tamper = untampered
    check_mean(five.train(), range(5))


def test_who_is_silent_again_and_again_pauses_ever_longer_and_comes_back(federation):
    six = federation(6)
    six.tamper = losing(dict.fromkeys((3, 4, 5), "train"))
    asked = []
    for _ in range(4):
        six.train()
        asked.append(six.in_sum())
    everyone, rest = {0, 1, 2, 3, 4, 5}, {0, 1, 2}
    assert asked == [everyone, everyone, rest, everyone]
    six.tamper = untampered
    for _ in range(4):
        six.train()
        asked.append(six.in_sum())
    assert asked[4:] == [rest, rest, rest, everyone]


def test_pauses_leave_three_nodes_in_a_sum(federation):
    four = federation(4)
    four.tamper = losing({2: SHARE, 3: SHARE})
    for _ in range(3):
        assert four.fails()
        assert four.in_sum() == {0, 1, 2, 3}
    four.tamper = untampered
    check_mean(four.train(), range(4))


def test_a_longer_update_is_cut_to_the_norm_by_the_node_itself(federation, caplog):
    start = {"weight": np.zeros(16, np.float32)}
    size = {0: 1.0, 1: 1.0, 2: 1e4}
    three = federation(
        3,
        start=start,
        update=lambda node: ({"weight": np.full(16, size[node], np.float32)}, 1),
        longest=8.0,
    )
    mean = as_arrays(three.train()[0].content[ARRAYS])["weight"]
    assert mean == pytest.approx(np.full(16, (1 + 1 + 8 / 4) / 3), rel=1e-6)
    assert "norm of this node's arrays, 4e+04, is cut to 8" in caplog.text


@pytest.mark.parametrize(
    ("model", "samples", "reason"),
    [
        (np.nan, 10, "not finite"),
        (0.5, 2**26, "more than 22,369,621, the most of each of 3 nodes"),
    ],
)
def test_a_node_whose_numbers_have_no_room_says_so(federation, model, samples, reason):
    three = federation(
        3,
        start={"weight": np.zeros(2, np.float32)},
        update=lambda node: ({"weight": np.full(2, model, np.float32)}, samples),
    )
    assert three.fails()
    assert reason in str(three.grid.failures)


def test_the_quorum_is_of_all_nodes_that_the_sum_began_with(federation):
    ten = federation(10, quorum=0.9)
    ten.tamper = losing({1: SHARE, 2: SHARE})
    with pytest.raises(QuorumError, match="8 of 10 nodes", check=at("quorum", value=0.9)):
        ten.train()


def test_the_journal_has_the_means_and_nothing_of_a_single_node(federation, tmp_path):
    with Journal(tmp_path / "journal.jsonl", None) as journal:
        federation(3, journal=journal).train()
        weights = [update_of(node)[1] for node in range(3)]
        mean = np.average([0, 0.25, 0.5], None, weights)
        assert journal.mean("train", "train-loss") == pytest.approx(mean)
    phases = journal_of(tmp_path, "phase")
    losses = [of.get("train-loss") for entry in phases for of in entry["nodes"].values()]
    assert sorted(entry["phase"] for entry in phases) == sorted(STEPS)
    assert [loss for loss in losses if loss] == [pytest.approx(mean)] * 3


def certified(folder, num_nodes):
    """Node configs of nodes that one authority has certified."""
    authority = CertificateFolder(folder / "authority")
    authority.create(10)
    configs = []
    for name in (f"ward-{node}" for node in range(num_nodes)):
        request_node(folder / name, name, ["127.0.0.1"])
        authority.sign((folder / name / "node.csr").read_bytes(), 5, ["127.0.0.1"])
        files = {
            "peer-authority": folder / "authority" / "nodes-ca.crt",
            "peer-certificate": folder / "authority" / name / "node.crt",
            "peer-key": folder / name / "node.key",
        }
        configs.append({key: str(path) for key, path in files.items()})
    return configs


@pytest.fixture(scope="module")
def credentials(tmp_path_factory):
    return certified(tmp_path_factory.mktemp("certificates"), 5)


def test_nodes_with_certificates_sum(federation, credentials):
    three = federation(3, node_config=credentials.__getitem__)
    check_mean(three.train(), range(3))
    check_mean(three.train(), range(3))


@pytest.mark.parametrize("what", ["its own keys", "keys of an earlier sum", "a node twice"])
def test_nodes_with_certificates_take_no_keys_of_the_servers(federation, credentials, what, caplog):
    three = federation(3, node_config=credentials.__getitem__)
    three.train()
    earlier = three.seen[2, ANNOUNCE][SECURE]

    def lie(node, step, content):
        if step != SHARE or node == 2:
            return
        peers = {key: [*v] if isinstance(v, list) else v for key, v in content[SECURE].items()}
        if what == "its own keys":
            peers["seal-keys"][2] = peers["mask-keys"][2] = b"k" * 32
        elif what == "keys of an earlier sum":
            for key in ("seal-key", "mask-key", "commitment", "signature"):
                peers[f"{key}s"][2] = earlier[key]
        else:
            for key in ("names", "certificates", "signatures"):
                peers[key][2] = peers[key][1 - node]
        content[SECURE] = ConfigRecord(peers)

    three.lie = lie
    assert three.fails()
    assert "not signed with a certificate" in caplog.text
    assert "of 3 nodes shared their secrets, and it needs 3" in caplog.text


def test_a_node_without_a_certificate_is_left_out_by_those_that_have_one(
    federation, credentials, caplog
):
    five = federation(5, node_config=lambda node: credentials[node] if node != 3 else {})
    assert five.fails()
    assert f"without node {FIRST + 3}: 4 of 5 nodes refuse its keys" in caplog.text
    check_mean(five.train(), [0, 1, 2, 4])


def test_who_shows_anothers_certificate_is_left_out_and_its_owner_is_not(federation, credentials):
    five = federation(5, node_config=credentials.__getitem__)

    def others(key):
        return lambda record: five.seen[1, ANNOUNCE][SECURE][key]

    show = {key: others(key) for key in ("certificate", "signature")}
    five.tamper = changing(3, ANNOUNCE, **show)
    five.train()
    check_mean(five.train(), [0, 1, 2, 4])


def test_one_certificate_under_two_ids_is_in_no_sum(federation, credentials):
    five = federation(5, node_config=lambda node: credentials[min(node, 3)])
    five.train()
    check_mean(five.train(), [0, 1, 2])


def test_what_a_node_signs_names_the_sum_and_all_its_keys():
    keys = (b"a" * 32, b"b" * 32, b"c" * 32)
    digests = {keys_digest(1, *keys), keys_digest(2, *keys), keys_digest(1, *reversed(keys))}
    assert len(digests) == 3
