"""The methods of FedHEAD's tables train on texts and on flows, with samples that no node gets."""

import json

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flwr_distill.client.app import app
from flwr_distill.client.auxiliary import auxiliary_of
from flwr_distill.client.session import Session
from flwr_distill.server.app import main
from flwr_distill.strategies.hfldd.method import DISTILL
from flwr_distill.task.errors import ReportedError, SettingsError
from flwr_distill.task.settings import TaskSettings
from flwr_distill.task.source import data_spec, partition_samples, reserved_samples
from tests.errors import at

METHODS = ["fedavg", "fedhkd", "fedhead", "fedmd", "feddf", "fedhead-plus"]
NODES, RESERVED = 3, 8
DATA = {
    "texts": {"dataset": "sst-2", "model": "fedhead-bilstm"},
    "flows": {"dataset": "csv", "model": "mlp"},
}
SETTING = {
    "num-rounds": 2,
    "min-nodes": NODES,
    "partition.scheme": "iid",
    "partition.reserved": RESERVED,
    "train.local-epochs": 1,
    "fedhead.reference": "reserved",
    "fedhead.reference-size": RESERVED,
    "fedhead.distill-epochs": 1,
    "fedhead.server-epochs": 1,
    "fedmd.auxiliary": "reserved",
    "fedmd.auxiliary-size": RESERVED,
    "fedmd.pretrain-epochs": 1,
    "fedmd.public-epochs": 1,
    "fedmd.private-epochs": 1,
    "fedmd.test-set": True,
}


@pytest.fixture
def config(request, tmp_path):
    """Run config with the files of sixty texts or flows, all different, and twenty to test."""
    own = DATA[request.param]
    for part, numbers in (("train", range(60)), ("test", range(60, 80))):
        rows = [(i % 2, f"word{i} film number{i % 7}", (i, i * i % 11)) for i in numbers]
        texts = [f"{label}\t{text}" for label, text, _ in rows]
        flows = [f"{label},{a},{b}" for label, _, (a, b) in rows]
        (tmp_path / f"{part}.tsv").write_text("\n".join(["label\ttext", *texts]) + "\n")
        (tmp_path / f"{part}.csv").write_text("\n".join(["label,bytes,packets", *flows]) + "\n")
    return {**SETTING, **own, "data-root": str(tmp_path), "runs-dir": str(tmp_path / "runs")}


def rows_of(samples):
    return {row.tobytes() for row in samples.inputs.numpy()}


@pytest.mark.parametrize("config", DATA, indirect=True)
@pytest.mark.parametrize("strategy", METHODS)
def test_a_method_trains_on_them_to_the_end(client_grid, config, strategy, tmp_path):
    config = {**config, "strategy": strategy}
    main(client_grid(NODES, config), Context(7, 1, {}, RecordDict(), config))
    rows = [json.loads(line) for line in (tmp_path / "runs/7/metrics.jsonl").open()]
    assert len(rows) == 3
    measured = "node_accuracy" if strategy == "fedmd" else "accuracy"
    assert all(0 <= row[measured] <= 1 for row in rows[1:])
    assert not any(row["set_aside"] for row in rows)


@pytest.mark.parametrize("config", ["texts"], indirect=True)
@pytest.mark.parametrize("strategy", ["hfldd", "fedlgd"])
def test_texts_are_not_distilled(client_grid, config, strategy):
    """A distiller would move the numbers of their words, and leave no text."""
    own = {"strategy": strategy, "hfldd.auxiliary": "reserved", "hfldd.auxiliary-size": RESERVED}
    config = {**config, **own, "hfldd.groups": NODES}
    with pytest.raises(ReportedError, match="contains texts, which cannot be distilled"):
        main(client_grid(NODES, config), Context(7, 1, {}, RecordDict(), config))


@pytest.mark.parametrize("config", ["texts"], indirect=True)
def test_a_node_distils_no_texts_though_a_server_asks(config, tmp_path):
    """A strategy that takes HFLDD for a while, as `auto` does, declares no needs of HFLDD."""
    config = {**config, "hfldd.auxiliary": "reserved"}
    node = {"partition-id": 0, "num-partitions": NODES, "state-dir": str(tmp_path)}
    message = Message(RecordDict({"config": ConfigRecord()}), 1, DISTILL)
    message.metadata.__dict__["_message_id"] = "1"
    with pytest.raises(SettingsError, check=at("strategy")):
        app(message, Context(1, 1, node, RecordDict(), config))


@pytest.mark.parametrize("config", DATA, indirect=True)
def test_no_node_gets_a_reserved_sample_and_all_read_the_same_ones(config, tmp_path):
    task = TaskSettings.from_run_config(config)
    spec = data_spec(task)
    reserved = reserved_samples(task, spec, RESERVED)
    nodes = [partition_samples(task, i, NODES).to_samples(spec) for i in range(NODES)]
    assert len(rows_of(reserved)) == RESERVED
    assert sum(map(len, nodes)) == 60 - RESERVED
    assert not rows_of(reserved) & set.union(*map(rows_of, nodes))
    for i in range(NODES):
        node = {"partition-id": i, "num-partitions": NODES, "state-dir": str(tmp_path)}
        session = Session.of(Context(1, i, node, RecordDict(), config))
        assert torch.equal(auxiliary_of(session, "reserved", 5), reserved.inputs[:5])
    other = task.model_copy(update={"seed": 1})
    assert rows_of(reserved_samples(other, spec, RESERVED)) != rows_of(reserved)


@pytest.mark.parametrize("config", DATA, indirect=True)
@pytest.mark.parametrize("strategy", ["feddf", "fedhead-plus"])
def test_more_reference_samples_than_are_reserved_are_refused_before_anyone_trains(
    client_grid, config, strategy
):
    config = {**config, "strategy": strategy, "partition.reserved": RESERVED - 1}
    grid = client_grid(NODES, config)
    with pytest.raises(SettingsError, check=at("fedhead.reference", value="reserved")):
        main(grid, Context(7, 1, {}, RecordDict(), config))


@pytest.mark.parametrize("config", ["texts"], indirect=True)
def test_noise_is_no_text(client_grid, config):
    config = {**config, "strategy": "feddf", "fedhead.reference": "noise"}
    with pytest.raises(SettingsError, check=at("fedhead.reference", value="noise")):
        main(client_grid(NODES, config), Context(7, 1, {}, RecordDict(), config))


@pytest.mark.parametrize("config", ["flows"], indirect=True)
def test_the_server_distils_on_the_reserved_samples(client_grid, config, monkeypatch):
    import flwr_distill.strategies.common.server_distillation as server

    read, distil = [], server.distil_ensemble

    def watched(student, inputs, *arguments, **settings):
        read.append(inputs)
        return distil(student, inputs, *arguments, **settings)

    monkeypatch.setattr(server, "distil_ensemble", watched)
    config = {**config, "strategy": "feddf", "num-rounds": 1}
    main(client_grid(NODES, config), Context(7, 1, {}, RecordDict(), config))
    task = TaskSettings.from_run_config(config)
    expected = reserved_samples(task, data_spec(task), RESERVED).inputs
    assert torch.equal(read[0], expected)
