"""Features of a frozen network: kept on a node's disk, and never those of another network."""

import io
import logging

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import save_file
from torch import nn

from flwr_distill.client import features
from flwr_distill.client.features import kept_features
from flwr_distill.client.local_round import build_model
from flwr_distill.client.session import Session
from flwr_distill.task.backbones import Frozen, fingerprint
from flwr_distill.task.backbones.random_features import WIDTH
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.models import model_of


@pytest.fixture
def session_of(tmp_path):
    """A node in a run with these settings."""

    def session_of(run_id=1, **settings):
        node = {"partition-id": 0, "num-partitions": 10, "state-dir": str(tmp_path / "state")}
        config = {"dataset": "digits", "model": "random-features", **settings}
        return Session.of(Context(run_id, 5, {**node, "device": "cpu"}, RecordDict(), config))

    return session_of


@pytest.fixture
def weights(tmp_path):
    """Write random weights of the network into the file that runs name; give them."""
    file = tmp_path / "network.safetensors"

    def weights(seed):
        draws = torch.Generator().manual_seed(seed)
        waves = torch.randn(WIDTH, 64, generator=draws)
        save_file({"waves": waves, "phases": torch.zeros(WIDTH)}, file)
        return waves

    weights.settings = {"backbone.weights": str(file)}
    return weights


def features_of(session):
    return kept_features(session, session.data.train.inputs)


def files(tmp_path):
    return sorted((tmp_path / "state").rglob("features-*.npy"))


def test_a_file_of_weights_that_changed_gives_other_features_and_another_hash(session_of, weights):
    seen, hashes = [], []
    for run_id, seed in ((1, 0), (2, 1), (3, 0)):  # one process, as a warm node's
        waves = weights(seed)
        session = session_of(run_id, **weights.settings)
        seen.append(features_of(session))
        own = model_of(session.task, session.data.spec)
        hashes.append(fingerprint(own))
        expected = torch.cos(session.data.train.inputs.flatten(1) @ waves.T)
        expected = nn.functional.normalize(expected).half().numpy()
        np.testing.assert_allclose(seen[-1], expected, atol=1e-3)
        state = {name: array.numpy() for name, array in own.state_dict().items()}
        assert torch.equal(build_model(session, state).network.waves, waves)
    assert hashes[0] == hashes[2] != hashes[1]
    assert np.array_equal(seen[0], seen[2])


def test_features_are_kept_in_half_precision(session_of, tmp_path):
    first = features_of(session_of())
    (file,) = files(tmp_path)
    kept = np.load(io.BytesIO(file.read_bytes()))
    assert kept.dtype == first.dtype == np.float16
    assert np.array_equal(kept, first)


def test_the_log_tells_how_far_it_is(session_of, monkeypatch, caplog):
    monkeypatch.setattr(features, "LOG_INTERVAL", 0.0)
    caplog.set_level(logging.INFO)
    session = session_of()
    features_of(session)
    size = len(session.data.train)
    told = [line for line in caplog.messages if line.startswith("Features of")]
    assert told[0] == f"Features of 64 of {size} samples"
    assert told[-1] == f"Features of {size} of {size} samples"


class Endless(nn.Module):
    """Features that half precision does not hold."""

    def forward(self, images):
        return images.flatten(1) * float("inf")


def endless(spec):
    return Frozen(Endless(), 64, spec)


def test_features_that_are_no_numbers_are_refused_and_not_kept(session_of, tmp_path):
    with pytest.raises(SettingsError, match="its features are beyond 65,504"):
        features_of(session_of(model=f"{__name__}:endless"))
    assert not files(tmp_path)


class Pixels(nn.Module):
    """A network without weights, as filters are; `turned` stands for a change of its code."""

    turned = False

    def forward(self, images):
        return (images.flip(3) if self.turned else images).flatten(1)


def pixels(spec):
    return Frozen(Pixels(), 64, spec)


def test_features_are_of_the_code_that_the_network_has_now(session_of, monkeypatch):
    for turned in (False, True, False):  # of no weights: no hash of them tells these apart
        monkeypatch.setattr(Pixels, "turned", turned)
        session = session_of(model=f"{__name__}:pixels")
        images = session.data.train.inputs
        expected = nn.functional.normalize((images.flip(3) if turned else images).flatten(1))
        np.testing.assert_allclose(features_of(session), expected.half().numpy(), atol=1e-3)


def test_of_the_same_network_features_are_computed_once(session_of, monkeypatch):
    first = features_of(session_of())
    seen = []
    monkeypatch.setattr(Frozen, "features", counting(Frozen.features, seen))
    assert np.array_equal(features_of(session_of(2)), first)
    assert sum(seen) < 10 < len(first)


def counting(compute, seen):
    def counted(model, images):
        seen.append(len(images))
        return compute(model, images)

    return counted
