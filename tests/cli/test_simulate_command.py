"""`flwr-distill simulate`: one command runs a federation, or says in one line why not."""

import numpy as np
import pytest
from PIL import Image

from tests.cli.commands import assert_refused, command


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("-c", "train.lr=-1"), "train.lr"),
        (("-c", "num-rounds 3"), "num-rounds 3"),
        (("--preset", "hfldd-mnist-c3"), "hfldd-mnist-c3"),
        (("--data", "own", "--nodes", "3"), "nodes = 3"),
        (("--data", "own/ward", "--data", "own", "--nodes", "3"), "nodes = 3"),
        (("--data", "own", "--data", "none"), "data = 'none'"),
        (("--data", "own/ward"), "data = 'own/ward'"),
        (("--data", "none"), "data = 'none'"),
        (("--data", "own.csv"), "data = 'own.csv'"),
        (("--policy", "hospitable"), "hospitable"),
        (("--policy", "hospital"), "fewest-of-a-class"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(options, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "ward").mkdir(parents=True)
    (tmp_path / "own.csv").touch()
    assert_refused(command("simulate", *options), named)


@pytest.mark.deployment("`simulate`, with and without a policy")
@pytest.mark.slow
def test_nodes_with_data_of_their_own_train_and_their_results_are_shown(tmp_path):
    draws = np.random.default_rng(0)
    for ward in ("a", "b"):
        for number in range(12):
            label = "cat" if number % 2 else "dog"
            folder = tmp_path / "wards" / ward / label
            folder.mkdir(parents=True, exist_ok=True)
            pixels = draws.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    config = (
        'strategy="fedavg" num-rounds=1 private.classes="cat,dog" private.shape="1x8x8" '
        "fraction-evaluate=1.0"
    )
    options = ("--data", tmp_path / "wards", "--workers", 2, "--runs-dir", tmp_path / "runs")
    result = command("simulate", "-c", config, *options)
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "runs").glob("[0-9]*")
    assert str(folder) in result.output
    assert (folder / "report.html").exists()


@pytest.mark.slow
def test_nodes_that_share_a_data_set_train_in_batches(tmp_path):
    options = ("--nodes", 3, "--workers", 1, "--device", "cpu", "--runs-dir", tmp_path / "runs")
    config = 'strategy="fedavg" dataset="digits" num-rounds=1 simulation.together="on"'
    result = command("simulate", "-c", config, *options)
    assert result.exit_code == 0, result.output
    assert list(tmp_path.glob("runs/nodes/runs/*/together-*/done-*"))


@pytest.mark.slow
def test_a_run_that_fails_ends_in_one_line(tmp_path):
    options = ("--nodes", 2, "--workers", 1, "--runs-dir", tmp_path / "runs")
    result = command("simulate", "-c", 'dataset="digits" hfldd.groups=40', *options)
    assert_refused(result, "hfldd.groups")


@pytest.mark.deployment("`simulate`, with and without a policy")
@pytest.mark.slow
def test_nodes_with_a_policy_refuse_what_it_does_not_allow(tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("strategies: [fedavg]\n")
    options = ("--nodes", 2, "--workers", 1, "--policy", policy, "--runs-dir", tmp_path / "runs")
    result = command("simulate", "-c", 'strategy="fedprox"', *options)
    assert_refused(result, "strategies", "fedprox")
    outbox = command("outbox", "--state-dir", tmp_path / "runs" / "nodes" / "node-0")
    assert "strategies" in outbox.output
