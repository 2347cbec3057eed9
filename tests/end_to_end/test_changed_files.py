"""Nodes whose processes are warm from an earlier run read what is on disk, with real processes."""

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.server.page.run_files import read_run

from .runs import complete

NAMES = ["zero", "one", "two"]


def write_site(folder, first, shift):
    """Every second picture of three digits, in the folder of its class, or `shift` classes on."""
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        if number < 600 and number % 2 == first and label < len(NAMES):
            own = folder / NAMES[(label + shift) % len(NAMES)]
            own.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 255 / 16).astype(np.uint8)).save(own / f"{number}.png")


def node_accuracy(federation, runs):
    config = {
        "strategy": "fedavg",
        "dataset": "private",
        "private.shape": "1x8x8",
        "private.classes": ",".join(NAMES),
        "fraction-evaluate": 1.0,
        "num-rounds": 3,
    }
    run = read_run(complete(federation, runs, config))
    return run.rows[-1]["node_accuracy"], run


@pytest.mark.slow
def test_labels_that_a_site_corrects_count_in_the_next_run_of_its_warm_node(tmp_path):
    """One of two sites has mixed up its folders, and repairs them between two runs."""
    sites = [tmp_path / "a", tmp_path / "b"]
    for place, site in enumerate(sites):
        write_site(site, place, shift=place)
    with LocalFederation(2, tmp_path / "state", data=sites) as federation:
        mixed, _ = node_accuracy(federation, tmp_path / "runs")
        workers = [node.pid for node in federation.nodes]
        sites[1].rename(tmp_path / "wrong")
        write_site(sites[1], 1, shift=0)
        repaired, run = node_accuracy(federation, tmp_path / "runs")
        assert [node.pid for node in federation.nodes] == workers
    assert mixed < 0.8
    assert repaired > 0.9
    assert all(node["fingerprint"] for node in run.about["nodes"].values())
