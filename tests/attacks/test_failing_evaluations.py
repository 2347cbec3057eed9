"""Models on which an evaluation fails if a held-out sample has some property."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Error, Message

from flwr_distill.node.policy import HOSPITAL
from flwr_distill.protocol.arrays import as_record
from flwr_distill.task.models import create_model

from . import site as site_module
from .site import Site
from .test_policy_leaks import LIFT, PRIVATE, SPEC, account, evaluated, held_out_places, refused

HUGE = 1e30


def failing_above(place: int, value: float) -> ArrayRecord:
    """A model whose logits overflow for an image with a pixel above a value, from 0 to 255."""
    model = create_model("digits-cnn", SPEC, seed=0)
    state = {name: np.zeros(a.shape, np.float32) for name, a in model.state_dict().items()}
    state["0.weight"][0, 0, 1, 1] = state["2.weight"][0, 0, 1, 1] = 1.0
    state["0.bias"][0] = LIFT
    state["6.weight"][0, place] = HUGE
    state["6.bias"][0] = -HUGE * (value / 255 * 2 - 1 + LIFT)
    state["8.weight"][0, 0] = HUGE
    return as_record(state)


def test_an_evaluation_that_overflows_is_answered_with_noise_and_booked(tmp_path: Path) -> None:
    """It was refused for its loss: exact answers about held-out pixels, at an epsilon of 0."""
    site = Site(tmp_path, HOSPITAL, number=1500)
    site.run(**PRIVATE)
    largest = site.images[held_out_places(site)].reshape(-1, 16).max(0)[3]
    for number, value in enumerate((largest - 0.5, largest + 0.5), start=1):
        (answer,) = evaluated(site, failing_above(3, value)).content.values()
        assert set(answer) == {"num-examples", "eval-accuracy"}
        assert account(site) == pytest.approx(0.1 * number)


def test_evaluations_that_fail_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path, HOSPITAL.model_copy(update={"most_evaluations": 3}), number=1500)
    site.run(**PRIVATE)

    def fail(message: Message, context: Context) -> Message:
        return Message(Error(1, "no memory"), reply_to=message)

    monkeypatch.setattr(site_module, "app", fail)
    for _ in range(3):
        assert "no memory" in str(evaluated(site, failing_above(3, 0)).error.reason)
    assert refused(evaluated(site, failing_above(3, 0)), "most-evaluations")
    assert account(site) == 0.0
