"""The server names the virtual nodes that may train together, and nobody in a deployment."""

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from flwr_distill.server.grid.transport import name_companions


def test_nodes_with_the_very_same_records_are_companions():
    config, models = ConfigRecord({"lr": 0.1}), [ArrayRecord(), ArrayRecord()]
    messages = [
        Message(RecordDict({"arrays": models[node % 2], "config": config}), node, "train")
        for node in (7, 8, 9, 10, 11)
    ]
    name_companions(messages, {7: 4, 9: 1, 11: 0, 8: 2})
    named = [m.content.config_records.get("together", {}).get("partitions") for m in messages]
    assert named == [[0, 1, 4], [2], [0, 1, 4], None, [0, 1, 4]]
    batches = [
        m.content.config_records["together"]["batch"] for m in messages if m is not messages[3]
    ]
    assert len(set(batches)) == 2
    name_companions(again := messages[:1], {7: 4})
    assert again[0].content["together"]["batch"] not in batches


@pytest.fixture
def federation(play, tmp_path):
    """Runs three nodes for two rounds; gives the train messages."""

    def run(together, **node_config):
        play(
            {"simulation.together": together},
            node_config=node_config,
            runs_dir=str(tmp_path / f"{together}{len(node_config)}"),
        )
        return [m for m in play.grid.pushed if m.metadata.message_type == "train"]

    return run


def test_in_a_simulation_every_round_names_all_that_train(federation):
    alone, together = federation("off", simulated=True), federation("on", simulated=True)
    assert not any("together" in message.content for message in alone)
    assert [list(m.content["together"]["partitions"]) for m in together] == [[0, 1, 2]] * 6
    for name, array in alone[-1].content["arrays"].items():
        difference = abs(array.numpy() - together[-1].content["arrays"][name].numpy()).max()
        assert difference < 1e-6


def test_in_a_deployment_nothing_is_named(federation):
    assert not any("together" in message.content for message in federation("on"))
