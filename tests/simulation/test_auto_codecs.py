"""Runs with ``auto`` codecs: checks at growing gaps, choices that last, resumed or not."""

import json
from logging import WARNING

import pytest

from benchmarks.in_process import run_in_process
from flwr_distill.server import auto_codecs
from flwr_distill.server.auto_codecs import PERSONAL
from flwr_distill.server.page.run_page import write_report
from flwr_distill.simulation import coded

from .test_runs import NODE, NODES, TASK, models_of

AUTO = {"strategy": "fedavg", "down-codec": "auto", "up-codec": "auto"}


@pytest.fixture
def run(tmp_path):
    """Runs in this process, in a folder of its own; gives the run's folder."""

    def run(folder, wrap=lambda place, node: node, **config):
        run_in_process({**TASK, **config}, [NODE] * NODES, tmp_path / folder, wrap=wrap)
        return tmp_path / folder / "1"

    return run


@pytest.fixture
def over_networks(monkeypatch):
    """Virtual nodes say that they are not on loopback."""
    monkeypatch.setattr(coded, "LOOPBACK", False)


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def choices(folder):
    """What the journal has of codecs, by round."""
    entries = lines(folder, "journal.jsonl")
    return {line["round"]: line["codecs"] for line in entries if "codecs" in line}


def seen_by_nodes(log, fails=()):
    """Nodes that note which types of messages reach them; some fail at some."""

    def wrap(place, node):
        def answer(message):
            about = message.metadata
            log.append((place, about.message_type))
            if about.message_type in fails:
                raise RuntimeError("refused here")
            return node(message)

        return answer

    return wrap


def test_on_loopback_auto_is_float32_to_the_byte(run):
    plain = run("plain", strategy="fedavg")
    auto = run("auto", **AUTO)
    assert models_of(auto) == models_of(plain)
    sent = [[row["server_bytes"] for row in lines(f, "metrics.jsonl")] for f in (plain, auto)]
    assert sent[0] == sent[1]
    assert [(c["down"], c["up"]) for c in choices(auto).values()] == [("float32", "float32")]


def test_checks_come_after_rounds_1_2_4_and_nodes_evaluate_then_alone(run, over_networks):
    log = []
    folder = run("auto", wrap=seen_by_nodes(log), **AUTO, **{"num-rounds": 5})
    found = choices(folder)
    assert [*found] == [0, 1, 2, 4]
    tried = sum(1 + len(choice.get("tried", ())) for choice in list(found.values())[1:])
    assert sum(kind == "evaluate" for _, kind in log) == NODES * tried
    assert all(choice["nodes_counted"] == NODES for n, choice in found.items() if n)
    journal = lines(folder, "journal.jsonl")
    assert not [line for line in journal if line.get("phase") == "evaluate"]


def test_what_is_chosen_costs_little_and_saves_bytes(run, over_networks):
    plain = lines(run("plain", strategy="fedavg", **{"num-rounds": 8}), "metrics.jsonl")
    folder = run("auto", **AUTO, **{"num-rounds": 8})
    auto = lines(folder, "metrics.jsonl")
    for choice in choices(folder).values():
        if choice["down"] != "float32":
            assert choice["tried"][-1]["cost"] < 0.005
            assert choice["down"] == f"delta-{choice['up']}"
    last = [rows[8]["server_bytes"] - rows[5]["server_bytes"] for rows in (plain, auto)]
    assert last[1] < 0.6 * last[0]
    assert auto[-1]["accuracy"] > plain[-1]["accuracy"] - 0.03


def test_a_run_with_auto_codecs_that_was_resumed_ends_as_a_whole_one(run, over_networks):
    config = {**AUTO, "fraction-train": 0.5, "fraction-evaluate": 1.0}
    whole = run("whole", **config, **{"num-rounds": 5})
    run("parts", **config, **{"num-rounds": 2})
    run("parts", **config, **{"num-rounds": 3}, resume="latest")
    parts = run("parts", **config, **{"num-rounds": 5}, resume="latest")
    assert models_of(parts) == models_of(whole)
    assert choices(parts) == choices(whole)


def test_with_secure_sums_auto_is_float32_for_replies(run, over_networks):
    folder = run("sums", **AUTO, **{"secure-sums": True})
    assert {choice["up"] for choice in choices(folder).values()} == {"float32"}
    folder = run("up", **{**AUTO, "down-codec": "float32"}, **{"secure-sums": True})
    assert [(n, c["up"]) for n, c in choices(folder).items()] == [(0, "float32")]
    assert choices(folder)[0]["reason"]


@pytest.mark.parametrize("how", ["no samples", "refused"])
def test_where_nodes_cannot_evaluate_models_stay_exact_and_the_run_says_so(
    how, run, over_networks, monkeypatch
):
    logged = []
    monkeypatch.setattr(auto_codecs, "log", lambda level, *line: logged.append((level, str(line))))
    config = {"train.holdout": 0.0} if how == "no samples" else {}
    wrap = seen_by_nodes([], fails={"evaluate"} if how == "refused" else ())
    plain, auto = run("plain", strategy="fedavg", **config), run("auto", wrap, **AUTO, **config)
    assert models_of(auto) == models_of(plain)
    last = choices(auto)[1]
    assert last["down"] == last["up"] == "float32"
    assert [level for level, line in logged if last["reason"] in line] == [WARNING]


def test_nodes_with_models_of_their_own_get_float32_and_the_run_says_why(run, over_networks):
    plain, auto = run("plain", strategy="fedproto"), run("auto", **{**AUTO, "strategy": "fedproto"})
    assert models_of(auto) == models_of(plain)
    (only,) = choices(auto).values()
    assert (only["down"], only["up"], only["reason"]) == ("float32", "float32", PERSONAL)


def test_the_report_shows_each_choice_with_its_evidence(run, over_networks):
    folder = run("auto", **AUTO)
    page = write_report(folder).read_text()
    plain = write_report(run("plain", strategy="fedavg")).read_text()
    shown, not_shown = page.count("<h2>Codecs</h2>"), plain.count("<h2>Codecs</h2>")
    assert (shown, not_shown) == (1, 0)
    for choice in choices(folder).values():
        assert f">{choice['down']}<" in page
        for one in choice.get("tried", ()):
            assert f"{one['name']}: {100 * one['cost']:.2f}" in page
