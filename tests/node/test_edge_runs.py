"""Which run below serves which run above."""

import json
from itertools import count
from pathlib import Path

import pytest

from flwr_distill.fleet.edge_runs import MAX_RUNS, EdgeRuns
from flwr_distill.flower.control import RunStatus, SuperLinkError
from flwr_distill.protocol.edge import DOOR, END, GREET, OPEN, Opened, Opening
from flwr_distill.protocol.edge_calls import EdgeError, call, listen
from flwr_distill.protocol.meeting import Continuation
from flwr_distill.server.settings import default_settings

ABOVE = {"num-rounds": 5, "phase-timeout": 60.0, "fraction-evaluate": 0.0, "dataset": "digits"}
IDS = count(100)


class Runs:
    """Stands in for a SuperLink whose runs listen, and leave a checkpoint after a round."""

    def __init__(self):
        self.configs, self.ended, self.servers, self.status = [], [], {}, RunStatus("running")
        self.listens = True

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def start_run(self, bundle, config):
        run_id = next(IDS)
        self.configs.append(config)
        folder = Path(config["runs-dir"], config["resume"] or str(run_id), "checkpoints")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "round-000000.safetensors").touch()
        if self.listens:
            answers = {GREET: lambda request, seconds: b"", END: self.end(run_id)}
            self.servers[run_id] = listen(Path(config["edge"]), answers, threads=2)
        return run_id

    def end(self, run_id):
        def end(request, seconds):
            self.ended.append(run_id)
            self.servers[run_id].stop(grace=0.1)
            return b""

        return end

    def run_status(self, run_id):
        return self.status


@pytest.fixture
def control():
    control = Runs()
    yield control
    for server in control.servers.values():
        server.stop(grace=None).wait()


@pytest.fixture
def edge(tmp_path, control):
    """Make an edge; it has one state directory."""

    def make(folder="sockets", **own):
        (tmp_path / folder).mkdir()
        own = {"strategy": "fedavg", **own}
        return EdgeRuns(tmp_path / folder, tmp_path / "below", own, lambda: control, b"")

    return make


def wanted(run, earlier=None, **config):
    opening = Opening(run=run, run_config={**ABOVE, **config}, earlier=earlier)
    return opening.model_dump_json(by_alias=True).encode()


def opened(runs, run, earlier=None, **config):
    return Opened.checked(json.loads(runs.open(wanted(run, earlier, **config), 60.0)), "test")


def test_a_run_above_has_one_run_below_however_often_it_asks(edge, control):
    runs = edge()
    assert opened(runs, "1") == opened(runs, "1")
    assert len(control.configs) == 1
    assert opened(runs, "2").socket != opened(runs, "1").socket
    assert len(control.configs) == 2


def test_the_edges_node_reaches_it_at_its_door(edge, tmp_path):
    runs = edge()
    server = runs.listen()
    answer = call(tmp_path / "sockets" / DOOR, OPEN, wanted("1"), 60.0)
    assert Path(json.loads(answer)["socket"]).parent == tmp_path / "sockets"
    with pytest.raises(EdgeError):
        call(tmp_path / "sockets" / DOOR, OPEN, b"no json", 60.0)
    server.stop(grace=None).wait()


def test_an_edge_that_was_killed_knows_its_runs_again(edge, control):
    opened(edge(), "1")
    control.servers.popitem()[1].stop(grace=None).wait()
    again = opened(edge("others"), "1")
    assert again.resumed
    first, second = control.configs
    assert first["resume"] == ""
    assert Path(second["runs-dir"], second["resume"], "checkpoints").is_dir()


def test_a_run_that_is_resumed_above_voids_what_came_after_its_round(edge, control, tmp_path):
    runs = edge()
    opened(runs, "1")
    (folder,) = (tmp_path / "below" / "runs").iterdir()
    for number in (1, 2):
        (folder / "checkpoints" / f"round-{number:06d}.safetensors").touch()
    opened(runs, "2")  # at the first meeting nobody knows yet that it is a resumed one
    earlier = Continuation(run_id="1", node_id="7", round=1)
    assert opened(runs, "2", earlier).resumed
    assert control.configs[-1]["resume"] == folder.name
    assert len(control.ended) == 2  # that of the first run, and the one that had just begun
    assert [f.name for f in (tmp_path / "below" / "runs").iterdir()] == [folder.name]
    rounds = sorted(file.stem for file in (folder / "checkpoints").iterdir())
    assert rounds == ["round-000000", "round-000001"]
    assert opened(runs, "2", earlier).resumed  # asked again: nothing changes
    assert len(control.configs) == 3


def test_a_run_that_the_edge_never_knew_is_new_to_it(edge):
    assert not opened(edge(), "2", Continuation(run_id="1", node_id="7", round=1)).resumed


def test_only_so_many_runs_are_there_at_a_time(edge, control):
    runs = edge()
    for run in range(MAX_RUNS):
        opened(runs, str(run))
    opened(runs, "0")  # now the second one was wanted longest ago
    opened(runs, str(MAX_RUNS))
    assert len(control.ended) == 1
    opened(runs, "0")
    assert len(control.configs) == MAX_RUNS + 1
    assert opened(runs, "1").resumed


def test_why_a_run_below_ended_at_once_is_told(edge, control):
    control.listens, control.status = False, RunStatus("finished:failed", "no such model")
    with pytest.raises(EdgeError, match=r"has ended \(finished:failed\): no such model"):
        opened(edge(), "1")


def test_a_run_below_that_does_not_start_is_waited_for_no_longer_than_the_message(edge, control):
    control.listens = False
    with pytest.raises(EdgeError, match="did not start in time"):
        edge().open(wanted("1"), 0.5)


def test_a_run_below_that_starts_late_serves_the_next_message(edge, control):
    """Another one would wait in vain for its folder."""
    runs, control.listens = edge(), False
    for _ in range(2):
        with pytest.raises(EdgeError, match="did not start in time"):
            runs.open(wanted("1"), 0.5)
    (config,) = control.configs
    server = listen(Path(config["edge"]), {GREET: lambda request, seconds: b""}, threads=2)
    assert opened(runs, "1").socket == config["edge"]
    assert len(control.configs) == 1
    server.stop(grace=None).wait()


def test_in_place_of_a_run_below_that_failed_as_it_started_another_one_starts(edge, control):
    runs, control.listens = edge(), False
    with pytest.raises(EdgeError, match="did not start in time"):
        runs.open(wanted("1"), 0.5)
    control.listens, control.status = True, RunStatus("finished:failed")
    assert opened(runs, "1").socket == control.configs[1]["edge"]


def test_settings_that_cannot_be_are_told(edge):
    with pytest.raises(EdgeError, match="seed = -1"):
        opened(edge(), "1", seed=-1)


def test_a_superlink_that_is_away_is_told(edge, control, monkeypatch):
    def refuse(bundle, config):
        raise SuperLinkError("the run was not accepted: no room")

    monkeypatch.setattr(control, "start_run", refuse)
    with pytest.raises(EdgeError, match="cannot start a run below: the run was not accepted"):
        opened(edge(), "1")


def test_a_run_config_as_flower_hands_it_out_is_read(edge):
    flat = {key: value for key, value in default_settings().items() if not isinstance(value, dict)}
    assert not opened(edge(), "1", **flat).resumed
