"""A run whose ServerApp dies continues from its last checkpoint, as if nothing had been."""

import json
import shutil
import threading
from collections import Counter
from contextlib import ExitStack
from itertools import count

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, RecordDict
from flwr.serverapp.strategy import FedAvg
from safetensors.numpy import load_file

from flwr_distill.fleet.dashboard.runs import RunFolder
from flwr_distill.protocol.registry import all_methods
from flwr_distill.server import app as server_app
from flwr_distill.server.app import main
from flwr_distill.server.export.model import run_to_export, weights_of
from flwr_distill.server.page.run_files import read_run
from flwr_distill.server.record import resume
from flwr_distill.server.record.checkpoint import (
    Checkpoint,
    CheckpointError,
    checkpoints,
    load_checkpoint,
)
from flwr_distill.server.record.resume import lock_run_folder, restore
from flwr_distill.server.roster import Roster, TooFewNodesError, meet_nodes
from flwr_distill.strategies.common.registry import find_strategy
from flwr_distill.strategies.feddm.method import DISTILL_AROUND
from flwr_distill.strategies.fedhead.method import TRAIN_SECTOR
from flwr_distill.strategies.fedlgd.method import TRAIN_VIRTUAL
from flwr_distill.strategies.hfldd.method import TRAIN_POOL
from flwr_distill_baselines.fedaf.method import DISTILL_WITH_PEERS
from flwr_distill_baselines.fedhkd.method import TRAIN_KNOWLEDGE
from flwr_distill_baselines.fedmd.method import TRAIN_CONSENSUS
from flwr_distill_baselines.fedproto.method import TRAIN_PROTOTYPES
from flwr_distill_baselines.fedseq.method import TURNS
from flwr_distill_baselines.fedseq_zaccone.method import TURNS as ZACCONE
from tests.errors import at
from tests.matrix import strategies
from tests.server.run_folder import journal, rows

NODES = 4
ROUNDS = 4
QUICK = {
    "num-rounds": ROUNDS,
    "min-nodes": NODES,
    "train.local-epochs": 1,
    "train.batch-size": 64,
    "partition.scheme": "dirichlet",
    "partition.alpha": 0.5,
    "fraction-evaluate": 0.5,
    "hfldd.groups": 2,
    "fedlgd.every": 2,
}
STATEFUL = [
    name
    for name in all_methods()
    if hasattr(find_strategy(name)[0], "state_dict") and name != "analytic"  # trains once
]
TRAINING = {
    *("train", DISTILL_AROUND, DISTILL_WITH_PEERS, TRAIN_VIRTUAL, TRAIN_POOL, TRAIN_SECTOR),
    *(TURNS.last, ZACCONE.last, TRAIN_CONSENSUS, TRAIN_KNOWLEDGE, TRAIN_PROTOTYPES),
}


class Killed(BaseException):
    """Stands in for SIGKILL of the ServerApp; real processes are killed in tests/faults."""


@pytest.fixture
def run(client_grid, little_distillation, tmp_path):
    """Run our ServerApp with nodes in this process; give the run's folder."""
    run_ids = count(1)  # as client_grid counts them

    def run(strategy="fedavg", killed_in=None, nodes=None, **changed):
        config = {**QUICK, **little_distillation, "strategy": strategy}
        config["runs-dir"] = str(tmp_path / "runs")
        config.update({key.replace("_", "-"): value for key, value in changed.items()})
        run_id = next(run_ids)
        grid = client_grid(NODES, config, **(nodes or {}))
        trained = []

        def killing(answer):
            def answer_or_kill(message):
                content = answer(message)
                config = message.content.config_records.get("config", {})
                if message.metadata.message_type in TRAINING:
                    trained.append(config["server-round"])
                if trained.count(killed_in) == 2:
                    raise Killed
                return content

            return answer_or_kill

        grid.nodes = {node: killing(answer) for node, answer in grid.nodes.items()}
        main(grid, Context(run_id, 1, {}, RecordDict(), config))
        return tmp_path / "runs" / str(run_id)

    return run


@pytest.fixture
def killed(run, tmp_path):
    """Run until the ServerApp is killed in round 3; give the run's folder."""

    def killed(strategy="fedavg", **changed):
        with pytest.raises(Killed):
            run(strategy, killed_in=3, **changed)
        return max((tmp_path / "runs").iterdir(), key=lambda folder: int(folder.name))

    return killed


def assert_same(resumed, whole):
    *_, last = sorted(int(run.name) for run in (whole.parents[1] / "state" / "runs").iterdir())
    models = [models_of(resumed, last), models_of(whole, int(whole.name))]
    assert models[0].keys() == models[1].keys() != set()
    for name, array in models[1].items():
        np.testing.assert_array_equal(models[0][name], array, err_msg=name)
    assert scores(resumed) == scores(whole)


def models_of(folder, run_id):
    """The global model; where there is none, those that nodes kept as their own in a run."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    files = (folder.parents[1] / "state" / "runs" / str(run_id)).glob(f"*/own-model@{ROUNDS:06d}")
    kept = {file.parent.name: load_file(file) for file in files}
    assert len(kept) == NODES
    return {f"{node} {name}": array for node, of in kept.items() for name, array in of.items()}


def scores(folder):
    keys = ("round", "accuracy", "loss", "node_accuracy")
    return [tuple(row[key] for key in keys) for row in rows(folder)]


@pytest.mark.parametrize("strategy", strategies(["fedavg", *STATEFUL, "fedavgm", "fedadam"]))
def test_a_resumed_run_ends_with_the_very_model_of_one_that_was_never_interrupted(
    run, killed, strategy, tmp_path
):
    """Also where it was killed while the last checkpoint was written."""
    whole = run(strategy)
    folder = killed(strategy)
    shutil.copytree(tmp_path, as_killed := tmp_path.with_name(f"{tmp_path.name}-as-killed"))
    run(strategy, resume=folder.name)
    assert_same(folder, whole)

    shutil.rmtree(tmp_path)
    as_killed.rename(tmp_path)
    _, newest = max(checkpoints(folder).items())
    newest.unlink()
    run(strategy, resume=folder.name)
    assert_same(folder, whole)


def test_what_a_run_left_at_its_end_is_no_result_of_the_rounds_after_which_it_continues(run):
    folder = run(num_rounds=2)
    with pytest.raises(Killed):
        run(num_rounds=4, resume=folder.name, killed_in=4)
    checkpoints(folder)[3].unlink()  # as if it was killed while this was written
    left = read_run(folder)
    exported = run_to_export(left)
    assert (left.state, left.rows[-1]["round"], exported.rows[-1]["round"]) == ("killed", 3, 2)
    second = load_checkpoint(checkpoints(folder)[2]).arrays
    weights = weights_of(exported)
    assert weights.keys() == second.keys()
    assert all(np.array_equal(weights[name], second[name].numpy()) for name in weights)


def test_a_resumed_run_rejects_what_the_whole_one_rejects(play, client_grid, tmp_path):
    """Updates of three nodes are compared with those of earlier rounds."""
    config = {"num-rounds": 4, "min-nodes": 3, "train.local-epochs": 1, "runs-dir": str(tmp_path)}

    def run(run_id, killed_in=None, **settings):
        grid = client_grid(3, {"strategy": "fedavg", **config})

        def spoiling(node, answer):
            def answer_or_spoil(message):
                content = answer(message)
                server_round = message.content.config_records.get("config", {}).get("server-round")
                if killed_in and server_round == killed_in:
                    raise Killed
                if server_round == 3 and node == min(grid.nodes):
                    content["arrays"] = ArrayRecord(
                        {
                            k: Array(v.numpy() * np.float32(1e6))
                            for k, v in content["arrays"].items()
                        }
                    )
                return content

            return answer_or_spoil

        grid.nodes = {node: spoiling(node, answer) for node, answer in grid.nodes.items()}
        return play(config, grid=grid, run_id=run_id, **settings)

    whole = run(1)
    with pytest.raises(Killed):
        run(2, killed_in=3)
    run(3, resume="2")
    assert [row["set_aside"] for row in rows(whole)] == [0, 0, 0, 1, 0]
    assert rows(tmp_path / "2")[-1]["set_aside"] == 0
    assert scores(tmp_path / "2") == scores(whole)


def test_nodes_that_are_back_under_other_ids_go_on_with_what_they_kept(run, killed):
    whole = run("hfldd")
    killed("hfldd")
    resumed = run("hfldd", resume="latest", nodes={"first_node": 2**63, "step": 7})
    assert not resumed.exists()  # the folder of the first run continues
    assert_same(resumed.parent / "2", whole)


def test_nodes_under_other_ids_have_one_name_each_in_the_report_of_all_rounds(run, killed):
    folder = killed()
    with pytest.raises(Killed):
        run(resume="latest", killed_in=4, nodes={"first_node": 2**63, "step": 7})
    run(resume="latest", nodes={"first_node": 2**62, "step": 5})
    left = read_run(folder)
    rounds = Counter(node for _, node, _ in left.reported("train-loss"))
    assert rounds == {f"node-{i}": ROUNDS for i in range(NODES)}
    assert len(left.about["nodes"]) == NODES  # others are not there
    assert "…" not in (folder / "report.html").read_text()
    dashboard = RunFolder(folder)
    dashboard.update()
    ids = {node for entry in left.journal for node in entry.get("nodes", {})}
    assert len(ids) == 3 * NODES
    assert {dashboard.name(node) for node in ids} == rounds.keys()


def test_a_run_can_be_killed_and_resumed_again_and_again(run, killed):
    whole = run("scaffold")
    folder = killed("scaffold")
    with pytest.raises(Killed):
        run("scaffold", resume="latest", killed_in=4)
    run("scaffold", resume="latest")
    assert_same(folder, whole)


def about_without_keys(folder):
    """Nodes' fingerprints are keyed by Flower's id of the run."""
    about = json.loads((folder / "about.json").read_text())
    for node in about["nodes"].values():
        assert node.pop("fingerprint")
    return about


def test_a_finished_run_goes_on_for_more_rounds(run):
    whole = run(num_rounds=3)
    shorter = run(num_rounds=2)
    about = about_without_keys(shorter)
    run(num_rounds=3, resume=shorter.name)
    assert_same(shorter, whole)
    assert about_without_keys(shorter) == about  # when it began, with whom


def test_the_last_checkpoints_and_the_best_are_kept(run):
    folder = run(num_rounds=3, keep_checkpoints=1)
    best = max(scores(folder), key=lambda row: row[1])[0]
    assert list(checkpoints(folder)) == sorted({best, 3})


def test_another_setting_is_an_error_that_changes_no_file(run, killed):
    folder = killed()
    before = sorted(file.read_bytes() for file in folder.iterdir() if file.is_file())
    with pytest.raises(CheckpointError, match="strategy = 'fedavg' then, 'cadis' now"):
        run("cadis", resume="latest")
    assert before == sorted(file.read_bytes() for file in folder.iterdir() if file.is_file())


def test_a_run_that_is_over_or_unknown_is_never_begun_again(run):
    with pytest.raises(CheckpointError, check=at("resume", value="latest")):
        run(resume="latest")
    folder = run(num_rounds=1)
    over = at("resume", value=folder.name, remedy="raise num-rounds to continue")
    with pytest.raises(CheckpointError, match="round 1 of 1", check=over):
        run(num_rounds=1, resume=folder.name)
    with pytest.raises(CheckpointError, match="no run 999", check=at("resume", value="999")):
        run(resume="999")


def test_a_damaged_checkpoint_is_an_error_that_names_the_file(run, killed):
    last = checkpoints(killed())[2]
    content = last.read_bytes()
    changed = bytearray(content)
    changed[-5] ^= 1
    other = (last.parent.parent / "settings.json").read_bytes()
    damages = {"cannot be read": [content[:-100], other], "was changed": [bytes(changed)]}
    for problem, contents in damages.items():
        for damaged in contents:
            last.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=problem, check=at(last)):
                run(resume="latest")


def test_a_stopped_run_that_is_about_to_end_is_waited_for(run, killed):
    folder = killed()
    with ExitStack() as held:
        held.enter_context(lock_run_folder(folder))
        ending = threading.Timer(1.0, held.close)
        ending.start()
        run(resume="latest")
        ending.join()


def test_a_run_that_still_goes_on_is_not_resumed(run, killed, monkeypatch):
    monkeypatch.setattr(resume, "ENDS_WITHIN", 0.5)
    folder = killed()
    with (
        lock_run_folder(folder),
        pytest.raises(CheckpointError, match="still running", check=at(f"run {folder.name}")),
    ):
        run(resume="latest")


def test_a_run_that_is_resumed_and_meets_no_nodes_has_failed_and_is_not_done(run):
    """It was done before, of fewer rounds."""
    folder = run()
    model = (folder / "model.safetensors").read_bytes()
    with pytest.raises(TooFewNodesError):
        run(resume="latest", num_rounds=ROUNDS + 1, min_nodes=NODES + 1, phase_timeout=1.0)
    assert read_run(folder).state == "failed"
    assert (folder / "model.safetensors").read_bytes() == model
    run(resume="latest", num_rounds=ROUNDS + 1)
    assert read_run(folder).state == "done"


def test_of_two_resumes_at_once_the_second_is_refused_before_it_reads_the_checkpoint(
    run, killed, monkeypatch
):
    monkeypatch.setattr(resume, "ENDS_WITHIN", 0.5)
    folder = killed()
    read, refused = [], []

    def load(file):
        read.append(file)
        return load_checkpoint(file)

    def meet(*args, **options):
        with pytest.raises(CheckpointError, match="still running", check=at(f"run {folder.name}")):
            run(resume="latest")
        refused.append(list(read))
        return meet_nodes(*args, **options)

    monkeypatch.setattr(resume, "load_checkpoint", load)
    monkeypatch.setattr(server_app, "meet_nodes", meet)
    run(resume="latest")
    assert refused == [read]
    assert len(read) == 1


def test_a_run_that_was_broken_off_leaves_topology_and_traffic(killed):
    folder = killed("hfldd")
    assert json.loads((folder / "topology.json").read_text())["heads"].keys() == {"1", "2"}
    assert TRAIN_POOL in json.loads((folder / "traffic.json").read_text())["measured"]


def test_rounds_of_a_resumed_run_stand_in_the_journal_once_and_all_bytes_are_booked(run, killed):
    whole = run()
    folder = killed()
    run(resume="latest")

    def trained(of):
        lines = [line for line in journal(of, "phase") if line["phase"] == "train"]
        return [line["round"] for line in lines]

    def booked(of):
        return json.loads((of / "traffic.json").read_text())["measured"]["train"]

    assert trained(folder) == trained(whole) == [*range(1, ROUNDS + 1)]
    assert booked(folder) == booked(whole)


def test_a_strategy_with_a_loop_of_its_own_cannot_be_resumed():
    class Own(FedAvg):
        def start(self, *args, **kwargs):
            return super().start(*args, **kwargs)

    with pytest.raises(CheckpointError, match="its own loop", check=at("Own")):
        restore(Own(), Checkpoint(1, 1, {}, {}, ArrayRecord(), {}, {}), Roster())
