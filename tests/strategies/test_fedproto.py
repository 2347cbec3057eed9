"""FedProto with our real ClientApp, against naive loops; only the wire is a grid in memory."""

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict

from flwr_distill.server.app import main
from flwr_distill.server.export.model import ExportError, run_to_export
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.rounds import NothingLearntError
from flwr_distill.storage.store import NodeStore
from flwr_distill.strategies.common.waiting import TooFewNodesError
from flwr_distill.task.datasets import load_dataset
from flwr_distill.task.models import create_model
from flwr_distill_baselines.fedproto.method import EVALUATE_PROTOTYPES, PROTOTYPES
from flwr_distill_baselines.fedproto.strategy import FedProto

from .naive import (
    UNEQUAL,
    assert_by_class,
    by_class,
    mean_over_nodes,
    play,
    sessions,
    start,
    trained,
)
from .rounds import FIRST, MODEL, spoil

NODES = 3
WIDTH = MODEL[-1].in_features


def strategy_of(**settings):
    return FedProto(model=MODEL, **{"weight": 0.5, **settings})


def naive_round(nodes, models, prototypes, server_round):
    """The nodes' models and the global prototypes after a round, class by class."""

    def distance(model, x, y):
        features, total = model[:-1](x), 0.0
        for label, prototype in prototypes.items():
            total = total + (features[y == label] - prototype.float()).square().sum()
        return 0.5 * total / features.numel()

    models = [
        trained(session, model, server_round, distance)
        for session, model in zip(nodes, models, strict=True)
    ]
    of_nodes = [
        by_class(model[:-1](s.data.train.inputs).detach(), s.data.train.labels)
        for s, model in zip(nodes, models, strict=True)
    ]
    return models, {**prototypes, **mean_over_nodes(of_nodes)}


def kept(tmp_path, place):
    """Weights that the node keeps."""
    from safetensors.torch import load

    (folder,) = tmp_path.glob(f"state/runs/*/{FIRST + place}")
    return load(NodeStore(folder).read("own-model"))


def test_rounds_equal_the_papers_steps_as_plain_loops(client_grid, tmp_path):
    grid, strategy, arrays = client_grid(NODES, UNEQUAL), strategy_of(), start(MODEL)
    nodes = sessions(UNEQUAL, tmp_path, NODES)
    models, prototypes = [MODEL] * NODES, {}
    for server_round in (1, 2):
        arrays = play(strategy, grid, server_round, arrays)
        models, prototypes = naive_round(nodes, models, prototypes, server_round)
        assert_by_class(strategy.prototypes, prototypes)
    assert all(len(s.data.train.labels.unique()) < 10 for s in nodes)  # each misses classes
    for place, model in enumerate(models):
        for name, value in kept(tmp_path, place).items():
            torch.testing.assert_close(value, model.state_dict()[name], atol=1e-5, rtol=0)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array.numpy(), MODEL.state_dict()[name])


def test_nothing_but_prototypes_travels(client_grid):
    grid, strategy = client_grid(NODES, UNEQUAL), strategy_of()
    sizes = []
    for node in list(grid.nodes):
        spoil(grid, node, lambda content: sizes.append({n: dict(r) for n, r in content.items()}))
    arrays = play(strategy, grid, 1, start(MODEL))
    play(strategy, grid, 2, arrays)
    assert all(reply.keys() == {"metrics", PROTOTYPES} for reply in sizes)
    sent = [set(message.content) for message in grid.pushed]
    assert (
        sent
        == [{"config", "prototype-distance"}] * NODES
        + [{"config", "prototype-distance", PROTOTYPES}] * NODES
    )


def test_nodes_evaluate_their_own_models_by_the_nearest_prototype(client_grid, tmp_path):
    run_config = {**UNEQUAL, "train.holdout": 0.3}
    grid, strategy = client_grid(NODES, run_config), strategy_of(fraction_evaluate=1.0)
    arrays = play(strategy, grid, 1, start(MODEL))
    messages = list(strategy.configure_evaluate(1, arrays, ConfigRecord(), grid))
    assert {m.metadata.message_type for m in messages} == {EVALUATE_PROTOTYPES}
    assert all("arrays" not in m.content for m in messages)
    for reply in grid.send_and_receive(messages):
        place = reply.metadata.src_node_id - FIRST
        holdout = sessions(run_config, tmp_path, NODES)[place].data.holdout
        model = create_model("auto", load_dataset("digits").spec, seed=3)
        model.load_state_dict(kept(tmp_path, place))
        features = model.eval()[:-1](holdout.inputs).detach()
        right = 0
        for feature, label in zip(features, holdout.labels.tolist(), strict=True):
            distances = {
                c: float((feature - torch.from_numpy(p)).norm())
                for c, p in strategy.prototypes.items()
            }
            right += min(distances, key=distances.get) == label
        metrics = reply.content["metrics"]
        assert metrics["eval-accuracy"] == pytest.approx(right / len(holdout))
        by_classifier = (model(holdout.inputs).argmax(1) == holdout.labels).double().mean()
        assert metrics["classifier-accuracy"] == pytest.approx(float(by_classifier))


def test_a_class_that_no_node_of_a_round_holds_keeps_its_prototype(client_grid):
    grid, strategy = client_grid(NODES, UNEQUAL), strategy_of(min_available_nodes=1)
    arrays = play(strategy, grid, 1, start(MODEL))
    before = dict(strategy.prototypes)
    held = set()
    spoil(grid, FIRST, lambda content: held.update(content[PROTOTYPES]["classes"].numpy().tolist()))
    grid.nodes = {FIRST: grid.nodes[FIRST]}
    strategy.min_train_nodes = 1
    play(strategy, grid, 2, arrays)
    assert before.keys() == strategy.prototypes.keys()
    for label in before:
        assert np.array_equal(before[label], strategy.prototypes[label]) == (label not in held)


def test_a_restarted_node_goes_on_with_its_own_model(client_grid, tmp_path):
    grid, strategy = client_grid(NODES, UNEQUAL), strategy_of()
    play(strategy, grid, 1, start(MODEL))
    play(strategy, grid, 2, start(MODEL))
    (folder,) = tmp_path.glob(f"state/runs/*/{FIRST}")
    assert sorted(NodeStore(folder).names()) == ["own-model@000001", "own-model@000002"]
    whole = kept(tmp_path, 0)
    for file in folder.iterdir():
        file.unlink()
    play(strategy, grid, 2, start(MODEL))
    assert not torch.equal(kept(tmp_path, 0)["0.weight"], whole["0.weight"])


@pytest.fixture
def run(client_grid, tmp_path):
    """Run our ServerApp on nodes in this process; give the run's folder."""

    def start_run(node_config=None, broken=lambda node, message: False, **settings):
        config = {key.replace("__", ".").replace("_", "-"): v for key, v in settings.items()}
        config = {"strategy": "fedproto", "num-rounds": 2, "min-nodes": NODES, **config}
        config = {**UNEQUAL, "train.local-epochs": 1, **config, "runs-dir": str(tmp_path)}
        grid = client_grid(NODES, config, broken, node_config)
        main(grid, Context(7, 1, {}, RecordDict(), config))
        return tmp_path / "7"

    return start_run


def test_a_run_has_the_nodes_accuracy_and_no_global_model(run):
    """Also with fraction-evaluate = 0, the default, since there is no other accuracy."""
    folder = run()
    files = read_run(folder)
    assert [row["accuracy"] for row in files.rows] == [None] * 3
    assert files.rows[0]["node_accuracy"] is None
    assert all(0 <= row["node_accuracy"] <= 1 for row in files.rows[1:])
    assert not (folder / "model.safetensors").exists()
    report = (folder / "report.html").read_text()
    assert "there is no global model" in report
    assert "mean features of each of their classes" in report
    with pytest.raises(ExportError, match="nodes keep models of their own under strategy = 'fed"):
        run_to_export(files)


def test_a_run_that_fails_after_a_round_saves_no_model_either(run, tmp_path):
    def from_round_two(node, message):
        return message.content.config_records.get("config", {}).get("server-round", 0) > 1

    with pytest.raises(NothingLearntError, match="no node sent anything usable for"):
        run(broken=from_round_two, num_rounds=3, patience_failed=1)
    assert (tmp_path / "7" / "report.html").exists()
    assert not (tmp_path / "7" / "model.safetensors").exists()


def test_a_node_may_have_another_architecture_with_as_many_features(run):
    run(node_config={"model": "tests.strategies.wide:SixtyFour"}, num_rounds=1)


def test_a_node_with_other_features_is_left_out_before_anyone_trains(run):
    with pytest.raises(TooFewNodesError, match=r"model = 'mlp': it has 200 features"):
        run(node_config={"model": "mlp"}, phase_timeout=3.0)
