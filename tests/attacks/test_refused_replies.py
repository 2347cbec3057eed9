"""Replies that are refused for what samples made of them: the refusal is an answer."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from flwr_distill.node.policy import HOSPITAL
from flwr_distill.protocol.arrays import as_record
from flwr_distill.task.models import create_model

from .site import Site
from .test_policy_leaks import PRIVATE, SPEC, account, refused


def trained(site: Site, **settings: float) -> Message:
    request = {"server-round": 1, "dp-noise": 1.0, "dp-delta": 1e-5, "local-epochs": 1}
    config = ConfigRecord({**request, "batch-size": 300, **settings})
    return site.ask("train", RecordDict({"arrays": overflowing(), "config": config}))


def overflowing() -> ArrayRecord:
    """A model with weights at the end of floats: it depends on the noisy gradient who passes it."""
    model = create_model("digits-cnn", SPEC, seed=0)
    state = {name: np.zeros(a.shape, np.float32) for name, a in model.state_dict().items()}
    state["8.bias"][:] = np.finfo(np.float32).max
    return as_record(state)


def test_a_reply_that_is_refused_for_a_number_that_overflows_costs_its_epsilon(
    tmp_path: Path,
) -> None:
    """Each run asked one question of the noisy gradients, and the account stayed at 0."""
    site = Site(tmp_path, HOSPITAL)
    site.run(**PRIVATE)
    assert refused(trained(site, lr=1e38), "replies")
    assert account(site) > 1


def test_what_exceeds_the_account_is_refused_for_that_whatever_the_reply_holds(
    tmp_path: Path,
) -> None:
    """Two refusals that cost nothing, and tell which of the two it was, were any number of bits."""
    site = Site(tmp_path, HOSPITAL.model_copy(update={"most_epsilon": 1.0}))
    site.run(**PRIVATE)
    for lr in (1e38, 1e-3):
        assert refused(trained(site, lr=lr), "most-epsilon")
    assert account(site) == pytest.approx(0.0)
