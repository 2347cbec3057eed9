"""FedAF with our real ClientApp, against naive loops: knowledge, data, the server's loss."""

import copy
import json

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch.nn import functional

from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.links.records import VIRTUAL_DATA
from flwr_distill.protocol.arrays import as_arrays, as_record
from flwr_distill.protocol.registry import all_methods, phases_of
from flwr_distill.server.app import main
from flwr_distill.task.models import create_model
from flwr_distill_baselines.fedaf.method import CLASS_KNOWLEDGE, DISTILL_WITH_PEERS
from flwr_distill_baselines.fedaf.peer_matching import distill_with_peers
from flwr_distill_baselines.fedaf.strategy import FedAF, knowledge_matching
from tests.grids import screening_grid

from .naive import UNEQUAL, assert_by_class, by_class, mean_over_nodes, sessions, start
from .rounds import FIRST, MODEL, SPEC, play

T = 1.5
LITTLE = {"per_class": 2, "distill_steps": 3, "server_epochs": 2, "server_batch_size": 16}


def strategy_of(**settings):
    little = {**LITTLE, "temperature": T, "global_weight": 0.6}
    return FedAF(model=MODEL, spec=SPEC, fraction_evaluate=0.0, **{**little, **settings})


def naive_matching(logits, labels, wanted):
    """Symmetric divergence from the soft labels of each class at hand, its mean over these."""
    divergences = []
    for label in labels.unique().tolist():
        if label not in wanted:
            continue
        own = (logits[labels == label] / T).softmax(1).mean(0)
        total = 0.0
        for r, t in zip(wanted[label], own, strict=True):
            total = total + r * (r / t).log() + t * (t / r).log()
        divergences.append(total / 2)
    return sum(divergences) / len(divergences)


def test_knowledge_is_matched_over_the_classes_at_hand_as_loops_say():
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 4, generator=draws).requires_grad_()
    labels = torch.tensor([0, 0, 0, 1, 1, 3, 3, 3, 3])
    wanted = torch.rand(4, 4, generator=draws).softmax(1)
    known = torch.tensor([True, False, True, True])  # 1 is unknown, 2 not at hand
    found = knowledge_matching(logits, labels, wanted, known, T)
    expected = naive_matching(logits, labels, {0: wanted[0], 3: wanted[3]})
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(value, logits)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients)
    assert knowledge_matching(logits, labels, wanted, known & False, T) == 0


def test_a_round_is_the_papers_steps_as_plain_loops(client_grid, tmp_path):
    grid, strategy = client_grid(3, UNEQUAL), strategy_of()
    found = play(strategy, grid)
    nodes = sessions(UNEQUAL, tmp_path, 3)
    of_logits, of_soft = [], []
    for session in nodes:
        data = session.data.train
        with torch.no_grad():
            logits = MODEL(data.inputs)
        of_logits.append(by_class(logits, data.labels))
        of_soft.append(by_class((logits / T).softmax(1), data.labels))
    peers, soft = mean_over_nodes(of_logits), mean_over_nodes(of_soft)
    (sent,) = {
        id(m.content["knowledge"]): m.content["knowledge"]
        for m in grid.pushed
        if m.metadata.message_type == DISTILL_WITH_PEERS
    }.values()
    arrays = as_arrays(sent)
    told = dict(zip(arrays["classes"].tolist(), arrays["logits"], strict=True))
    assert_by_class(told, peers, atol=1e-5)
    table, known = torch.zeros(10, 10), torch.zeros(10, dtype=torch.bool)
    for label, mean in peers.items():
        table[label], known[label] = mean.float(), True
    virtual = []
    for session in nodes:
        made = distill_with_peers(
            session.data.train.inputs,
            session.data.train.labels,
            MODEL,
            table,
            known,
            fresh=lambda seed: create_model("auto", SPEC, seed),
            num_classes=10,
            per_class=2,
            steps=3,
            generator=session.generator("fedaf", 1),
        )
        virtual.append(VirtualData.from_bytes(made.to_bytes()))
    images = torch.cat([own.images for own in virtual])
    labels = torch.cat([own.labels for own in virtual])
    model = copy.deepcopy(MODEL).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    words = np.random.SeedSequence([0, 1]).generate_state(1, np.uint64)
    draws = torch.Generator().manual_seed(int(words[0]) >> 1)
    wanted = {label: mean.float() for label, mean in soft.items()}
    for _ in range(2):
        for rows in torch.randperm(len(labels), generator=draws).split(16):
            optimizer.zero_grad()
            logits = model(images[rows])
            matching = naive_matching(logits, labels[rows], wanted)
            (functional.cross_entropy(logits, labels[rows]) + 0.6 * matching).backward()
            optimizer.step()
    for name, weight in model.state_dict().items():
        np.testing.assert_allclose(found[name].numpy(), weight.numpy(), atol=1e-5, err_msg=name)


def test_the_model_travels_to_a_node_once_a_round(client_grid):
    grid = client_grid(2, UNEQUAL)
    play(strategy_of(), grid)
    kinds = [(m.metadata.message_type, "arrays" in m.content) for m in grid.pushed]
    assert sorted(kinds) == 2 * [(CLASS_KNOWLEDGE, True)] + 2 * [(DISTILL_WITH_PEERS, False)]


def test_a_node_that_missed_the_model_of_the_round_says_so(client_grid):
    grid = client_grid(2, UNEQUAL)
    strategy = strategy_of()
    list(strategy.configure_train(1, start(MODEL), ConfigRecord(), grid))
    messages = list(strategy.configure_train(2, start(MODEL), ConfigRecord(), grid))
    messages[0].content["config"] = ConfigRecord({"server-round": 3})
    first, second = grid.send_and_receive(messages)
    assert "no global model of round 3" in first.error.reason
    assert not second.has_error()


def knowledge(**changes):
    arrays = {
        "classes": np.array([1, 4]),
        "counts": np.array([5, 2]),
        "logits": np.zeros((2, 10), np.float32),
        "soft-labels": np.full((2, 10), 0.1, np.float32),
    }
    return RecordDict(
        {
            "metrics": MetricRecord({"num-examples": 7}),
            "knowledge": as_record({**arrays, **changes}),
        }
    )


def data():
    images = torch.randn(4, *SPEC.shape, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, 1, 4, 4])
    return VirtualData(images, labels, method="fedaf", steps=1, seed=0, init="noise").to_bytes()


def node(told, payload):
    """A node that replies these, whatever it is sent."""

    def answer(message):
        if message.metadata.message_type == CLASS_KNOWLEDGE:
            return told
        sent = ConfigRecord({"payload": payload})
        return RecordDict({"metrics": MetricRecord({"num-examples": 7}), VIRTUAL_DATA: sent})

    return answer


BAD = {
    "huge logits": knowledge(logits=np.full((2, 10), 1e30, np.float32)),
    "infinite": knowledge(logits=np.full((2, 10), np.inf, np.float32)),
    "no distribution": knowledge(**{"soft-labels": np.full((2, 10), 0.3, np.float32)}),
    "another class": knowledge(classes=np.array([1, 10])),
    "another width": knowledge(
        logits=np.zeros((2, 3), np.float32), **{"soft-labels": np.full((2, 3), 1 / 3, np.float32)}
    ),
    "no counts": knowledge(counts=np.array([5, 0])),
    "nothing": RecordDict(),
}


@pytest.mark.parametrize("how", BAD)
def test_bad_knowledge_is_set_aside_and_its_node_is_asked_no_more(memory_grid, how, flower_log):
    good = node(knowledge(), data())
    with_bad = memory_grid({1: good, 2: node(BAD[how], data())})
    alone = memory_grid({1: good, 3: lambda _: 1 / 0})
    found, expected = play(strategy_of(), with_bad), play(strategy_of(), alone)
    for name, array in expected.items():
        assert np.array_equal(found[name].numpy(), array.numpy())
    asked = [m.metadata.dst_node_id for m in with_bad.pushed]
    assert sorted(asked) == [1, 1, 2]
    assert f"Reply of node 2 to {CLASS_KNOWLEDGE} rejected" in flower_log.text


def test_bad_data_are_set_aside_and_without_any_the_model_stays(memory_grid, flower_log):
    broken = node(knowledge(), b"\x00" * 20)
    assert play(strategy_of(), memory_grid({1: broken, 2: broken})) is None
    assert f"Reply of node 2 to {DISTILL_WITH_PEERS} rejected" in flower_log.text
    silent = node(RecordDict(), b"")
    assert play(strategy_of(), memory_grid({1: silent, 2: silent})) is None


@pytest.mark.parametrize("how", sorted({*BAD} - {"another class", "another width"}))
def test_knowledge_is_checked_before_the_strategy_sees_it(memory_grid, how):
    phases = phases_of(all_methods()["fedaf"])
    grid = memory_grid({FIRST: lambda _: BAD[how]})
    screening = screening_grid(grid, deadline=5, phases=phases, model={})
    (reply,) = screening.send_and_receive([Message(RecordDict(), FIRST, CLASS_KNOWLEDGE)])
    assert reply.has_error()


def test_a_run_learns_and_reports_what_nodes_disclosed(client_grid, tmp_path):
    config = {
        "strategy": "fedaf",
        "num-rounds": 2,
        "min-nodes": 2,
        "runs-dir": str(tmp_path / "runs"),
        "fedaf.per-class": 5,
        "fedaf.distill-steps": 20,
        "fedaf.server-lr": 0.1,
        "partition.classes": 5,
    }
    main(client_grid(2, config), Context(7, 1, {}, RecordDict(), config))
    folder = tmp_path / "runs" / "7"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.2
    report = (folder / "report.html").read_text()
    assert "highest cosine" in report
    assert "mean predictions" in report
