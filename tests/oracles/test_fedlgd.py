"""FedLGD against an independent reading of the paper.

The random networks that make the first virtual images are drawn in a way that no script can repeat
from the paper: these images are the run's own, made again from its generators.
"""

from dataclasses import replace
from functools import partial

import torch

from flwr_distill.client.virtual_data import virtual_images
from flwr_distill.distill.contrastive import mean_discrepancy
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.server.settings import RunSettings

from . import fedlgd
from .federation import SPEC, Federation, distance, features, network

NODES, EVERY, PER_CLASS, EPOCHS, LR, LAMBDA = 3, 2, 3, 2, 0.05, 0.05
SMALL = {
    "min_nodes": NODES,
    "fraction_evaluate": 0.0,
    "private__shape": "1x8x8",
    "partition__scheme": "iid",
    "train__holdout": 0.1,
    "train__lr": LR,
    "train__local_epochs": EPOCHS,
    "fedlgd__per_class": 4,
    "fedlgd__first_steps": 20,
    "fedlgd__every": EVERY,
    "fedlgd__refine_steps": 20,
    "fedlgd__global_per_class": PER_CLASS,
    "fedlgd__global_steps": 15,
    "fedlgd__contrast": LAMBDA,
}

ROUNDING = 1e-3
"""Wider than elsewhere: pixels are stored with 8 bits, and rounding may turn one into the next of
256 levels, which moves a model by 1e-4 of its length. Without such a pixel it is 2e-7.
"""


def stored(like, virtual):
    """Virtual data as nodes and server store them: with 8 bits a pixel."""
    read = VirtualData.from_bytes(replace(like, images=virtual[0], labels=virtual[1]).to_bytes())
    return read.images, read.labels


def test_five_rounds_are_those_of_the_paper(tmp_path):
    federation = Federation(tmp_path, "fedlgd-digits", NODES, **SMALL)
    found, f, nodes = federation.run(), network(), federation.sessions
    settings = RunSettings.from_run_config(federation.config).fedlgd
    first = [
        virtual_images(
            *(node.data, settings, node.generator("virtual"), node.device),
            steps=settings.first_steps,
        )
        for node in nodes
    ]
    own = [stored(one, (one.images, one.labels)) for one in first]
    labels = torch.arange(SPEC.num_classes).repeat_interleave(PER_CLASS)
    generator = torch.Generator().manual_seed(0)
    server = torch.randn(len(labels), *SPEC.shape, generator=generator), labels
    real = [(node.data.train.inputs, node.data.train.labels) for node in nodes]
    hyper = {
        **{"epochs": EPOCHS, "batch_size": federation.config["train.batch-size"], "lr": LR},
        **{"lambda": LAMBDA, "temperature": 0.07, "local_steps": 20, "global_steps": 15},
        "optimizer": partial(torch.optim.SGD, lr=1.0, momentum=0.5),  # the published code's
    }
    w, keep = federation.start, partial(stored, first[0])
    for t in range(1, 6):
        selected = (t - 1) % EVERY == 0

        def draws(c, t=t):
            return nodes[c].generator("train", t)

        w, own, server = fedlgd.round_of(
            f, features, w, real, own, server, selected, draws, hyper, keep
        )
    assert distance(found, w) < ROUNDING
    file = federation.folder / "1" / "virtual.safetensors"
    made = VirtualData.from_safetensors(file.read_bytes())
    assert distance({"images": made.images}, {"images": server[0]}) < 10 * ROUNDING


def test_the_distance_of_mean_features_is_that_of_the_paper():
    """Eq. 1 between two sets of features, as figure 3a uses it in training."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 5, generator=generator) for n in (12, 9))
    of_a, of_b = (torch.arange(len(x)) % 3 for x in (a, b))
    torch.testing.assert_close(mean_discrepancy(a, of_a, b, of_b), fedlgd.mmd(a, of_a, b, of_b))
