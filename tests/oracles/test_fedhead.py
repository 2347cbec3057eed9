"""FedHEAD and FedHEAD+ against an independent reading of the paper."""

import numpy as np
import pytest

from flwr_distill.strategies.common.draws import round_generator
from flwr_distill.strategies.fedhead.membership import draw_leader
from flwr_distill.task.datasets import auxiliary_images, load_dataset

from . import fedhead
from .federation import ROUNDING, SPEC, Federation, distance, network

BATCH, N_L, N_S, N_G, PATIENCE = 30, 6, 8, 12, 1
SMALL = {
    "partition__alpha": 0.5,
    "train__local_epochs": N_L,
    "train__batch_size": BATCH,
    "fedhead__distill_epochs": N_S,
    "fedhead__server_epochs": N_G,
    "fedhead__distill_batch_size": BATCH,
    "fedhead__patience": PATIENCE,
    "fedhead__reference_size": 90,
}


@pytest.mark.parametrize("preset", ["fedhead-cifar10", "fedhead-plus-cifar10"])
def test_five_rounds_are_those_of_the_paper(preset, tmp_path):
    images, path = load_dataset("digits").test.images[:, 0], str(tmp_path / "reference.npz")
    np.savez(path, images=images)
    federation = Federation(tmp_path, preset, 5, **SMALL, fedhead__reference=path)
    found, f, nodes = federation.run(), network(), federation.sessions
    data = [(node.data.train.inputs, node.data.train.labels) for node in nodes]
    assert not [n for n, _ in data if 1 in (len(n) % BATCH, (len(n) - len(n) // 10) % BATCH)], (
        "ours skip a last minibatch of one sample"
    )
    topology, place = federation.read("topology"), federation.place
    sectors = [[place(n) for n in (c["head"], *c["members"])] for c in topology["clusters"]]
    assert sorted(map(len, sectors)) == [2, 3]
    hyper = {
        "lr": federation.config["train.lr"],
        "weight_decay": federation.config["train.weight-decay"],
        **{"batch_size": BATCH, "patience": PATIENCE, "n_l": N_L, "n_s": N_S, "n_g": N_G},
    }
    reference = auxiliary_images(path, SPEC, 90, 0) if "plus" in preset else None
    w, purposes = federation.start, {"train": "train", "distil": "distill-sector"}
    for t in range(1, 6):

        def draws(purpose, client, t=t):
            if client is None:
                return round_generator(0, t)
            return nodes[client].generator(purposes[purpose], t)

        leaders = [place(name) for name in topology["heads"][str(t)]]
        w = fedhead.round_of(f, w, data, sectors, leaders, draws, hyper, reference)
    print(distance(found, w))
    assert distance(found, w) < ROUNDING


def test_a_client_leads_with_its_share_of_the_sectors_samples():
    """Leaders are drawn, so this is a matter of frequency: four standard deviations of it."""
    draws, shares = np.random.default_rng(1), np.array([0.5, 0.3, 0.2])
    counts = np.bincount([draw_leader(100 * shares, draws) for _ in range(4000)])
    assert np.abs(counts / 4000 - shares).max() < 4 * 0.5 / 4000**0.5
