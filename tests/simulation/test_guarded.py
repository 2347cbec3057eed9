"""Virtual nodes with a policy refuse, keep back and charge what real nodes do."""

import time

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from benchmarks.in_process import run_in_process
from flwr_distill.node.outbox import FOLDER, entries
from flwr_distill.node.policy import HOSPITAL, STANDARD, Policy
from flwr_distill.simulation.grid import Functions, SimulationGrid
from flwr_distill.simulation.guarded import Guarded
from flwr_distill.simulation.run import simulate
from tests.node.test_guard import (
    NODE,
    NODE_CONFIG,
    PLANTED,
    PRIVATE,
    make_node,  # noqa: F401
    train_message,
    trained,
)

RUN = 7
EXTRA = {"extra": ConfigRecord({"stolen": PLANTED})}
FEDAVG = {"strategy": "fedavg"}


class Virtual:
    """A virtual node, whose app replies as ordered."""

    def __init__(self, policy, state_dir, run_config):
        pool = Functions({NODE: lambda message: self.reply})
        config = {**NODE_CONFIG, "state-dir": str(state_dir)}
        self.grid = SimulationGrid([NODE], Guarded(pool, {NODE: config}, policy, RUN, run_config))

    def answers(self, content, message_type, reply):
        self.reply = reply
        (answer,) = self.grid.send_and_receive([Message(content, NODE, message_type)])
        return answer


def rule(error):
    """The rule that an error names."""
    return error.split(": ")[1:2]


def left(answer):
    """What leaves: the rule that an error names, or records with their values."""
    if answer.has_error():
        return answer.error.code, rule(answer.error.reason)
    return {
        name: {key: np.asarray(getattr(v, "numpy", lambda v=v: v)()) for key, v in record.items()}
        for name, record in answer.content.items()
    }


def charged(folder):
    """Lines of the outbox, without what differs each time."""
    lines = list(entries(folder / FOLDER))
    for line in lines:
        for name in ("time", "hash", "previous"):
            del line[name]
        line["error"] = rule(line.get("error", ""))
        line["bytes"] = pytest.approx(line["bytes"], abs=100)  # ids of messages differ in length
    return lines


@pytest.mark.parametrize(
    ("policy", "run_config", "exchanges"),
    [
        (HOSPITAL, PRIVATE, [({}, trained(2.0))]),
        (HOSPITAL, {**PRIVATE, "strategy": "fedaf"}, [({}, trained())]),
        (HOSPITAL, PRIVATE, [({"local-epochs": 11}, trained())]),
        (HOSPITAL, PRIVATE, [({}, trained(**EXTRA))]),
        (HOSPITAL, PRIVATE, [({}, trained(6.0)), ({}, trained(9.9)), ({}, trained(10.1))]),
        (STANDARD, FEDAVG, [({}, trained(**EXTRA))]),
        (Policy(direct_links=False, most_bytes_a_day=3_000), FEDAVG, 3 * [({}, trained())]),
    ],
)
def test_a_virtual_node_answers_and_charges_what_a_real_one_does(
    policy,
    run_config,
    exchanges,
    make_node,  # noqa: F811
    tmp_path,
):
    real = make_node(policy, **{key.replace(".", "__"): v for key, v in run_config.items()})
    virtual = Virtual(policy, tmp_path / "virtual", run_config)
    for config, reply in exchanges:
        answers = (
            node.answers(train_message(**config), "train", RecordDict(dict(reply)))
            for node in (virtual, real)
        )
        np.testing.assert_equal(*map(left, answers))
    assert charged(tmp_path / "virtual") == charged(tmp_path)


def test_rules_on_bundles_are_about_settings_alone(tmp_path):
    """The app is what is installed here, in no bundle."""
    policy = STANDARD.model_copy(update={"bundles": ["0" * 64]})
    for name, run_config, has_left in (
        ("a", FEDAVG, True),
        ("b", {**FEDAVG, "model": "my_package.net:Net"}, False),
    ):
        node = Virtual(policy, tmp_path / name, run_config)
        assert node.answers(train_message(), "train", trained()).has_content() == has_left


class Slow:
    """A pool that answers when the test lets it."""

    def __init__(self):
        self.messages, self.answers = [], []

    def submit(self, messages):
        self.messages += messages

    def wait(self, seconds):
        answers, self.answers = self.answers, []
        return answers


def test_a_node_has_one_message_at_a_time(tmp_path):
    pool = Slow()
    config = {**NODE_CONFIG, "state-dir": str(tmp_path)}
    grid = SimulationGrid([NODE], Guarded(pool, {NODE: config}, HOSPITAL, RUN, PRIVATE))
    contents = [train_message(), train_message(**{"local-epochs": 11}), train_message()]
    first, refused, last = grid.push_messages([Message(c, NODE, "train") for c in contents])
    assert [message.metadata.message_id for message in pool.messages] == [first]
    assert grid.pull_messages([first, refused, last]) == []
    pool.answers = [(first, trained(6.0))]
    assert [reply.has_content() for reply in grid.pull_messages([first, refused])] == [True, False]
    assert [message.metadata.message_id for message in pool.messages] == [first, last]
    pool.answers = [(last, trained(11.0))]
    assert grid.pull_messages([last])[0].has_error()


def test_a_message_that_expires_while_its_node_works_is_not_admitted(tmp_path):
    pool = Slow()
    config = {**NODE_CONFIG, "state-dir": str(tmp_path)}
    grid = SimulationGrid([NODE], Guarded(pool, {NODE: config}, HOSPITAL, RUN, PRIVATE))
    messages = [Message(train_message(), NODE, "train", ttl=ttl) for ttl in (60.0, 0.01)]
    first, expired = grid.push_messages(messages)
    time.sleep(0.02)
    pool.answers = [(first, trained())]
    assert len(grid.pull_messages([first, expired])) == 1
    assert len(pool.messages) == len(list(entries(tmp_path / FOLDER))) == 1


@pytest.mark.slow
def test_a_budget_that_a_run_has_spent_is_spent_in_the_run_that_resumes_it(tmp_path):
    nodes = 2 * [{"num-partitions": 2, "device": "cpu"}]
    config = {"strategy": "fedavg", "train.dp-noise": 1.0, "server-device": "cpu"}
    bounded = Policy(least_noise=1.0, most_epsilon=100.0)
    simulate({**config, "num-rounds": 1}, nodes, tmp_path, workers=2, policy=bounded)
    folders = [tmp_path / "nodes" / f"node-{place}" / FOLDER for place in range(2)]
    spent = [list(entries(folder))[-1]["lifetime"] for folder in folders]
    tight = bounded.model_copy(update={"most_epsilon": 1.01 * max(spent)})
    again = {**config, "num-rounds": 2, "resume": "latest"}
    simulate(again, nodes, tmp_path, workers=1, policy=tight)
    for folder in folders:
        last = list(entries(folder))[-1]
        assert (last["type"], rule(last["error"])) == ("train", ["most-epsilon"])


@pytest.mark.slow
def test_a_policy_that_allows_a_run_changes_no_model(tmp_path, little_distillation):
    nodes = 4 * [{"num-partitions": 4, "device": "cpu"}]
    links = {"strategy": "hfldd", "links": "relay", "hfldd.groups": 2, "hfldd.start": "noise"}
    task = {"dataset": "digits", "server-device": "cpu", "num-rounds": 1, "partition.classes": 3}
    config = {**little_distillation, **task, **links}
    run_in_process(config, nodes, tmp_path / "without")
    policy = Policy(replies="declared", direct_links=False, real_per_virtual=1)
    folder = simulate(config, nodes, tmp_path / "with", workers=2, policy=policy)
    models = [run / "model.safetensors" for run in (folder, tmp_path / "without" / "1")]
    assert models[0].read_bytes() == models[1].read_bytes()
    lines = [line for file in tmp_path.glob("with/nodes/*/outbox") for line in entries(file)]
    assert {parcel["purpose"] for line in lines for parcel in line["parcels"]} == {"virtual-data"}
