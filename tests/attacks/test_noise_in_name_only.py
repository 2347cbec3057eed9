"""Virtual data that are asked for with differential privacy that protects nothing."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict

from flwr_distill.node.policy import HOSPITAL, OPEN, STANDARD, Policy
from flwr_distill.node.requests import MessageRequest
from flwr_distill.storage.store import NodeStore
from flwr_distill.strategies.feddm.method import DISTILL_AROUND
from flwr_distill.strategies.fedlgd.method import TRAIN_VIRTUAL
from flwr_distill.strategies.hfldd.client import REFINED
from flwr_distill.strategies.hfldd.method import DISTILL
from flwr_distill.task.errors import SettingsError
from tests.errors import at

from .site import HFLDD, NODE, Site, crafted, refused
from .test_resumed_runs import begin, distil, epsilon, resume

__all__ = ["begin"]

NOISY = Policy(replies="declared", least_noise=1.0, classes=[str(label) for label in range(10)])


@pytest.mark.parametrize("value", [10.1, 1e9])
def test_noise_for_a_huge_epsilon_is_no_protection(
    tmp_path: Path, begin: Any, value: float
) -> None:
    """A run that set `hfldd.dp-epsilon=1e9` got 200 virtual images of 300 samples."""
    many = {"distilled-size": 200, "dp-epsilon": value}
    site = Site(tmp_path / "standard", STANDARD)
    begin(site, 7, strategy="hfldd", hfldd__start="noise")
    assert refused(distil(site, **many), "real-per-virtual")
    site = Site(tmp_path / "noisy", NOISY)
    begin(site, 8, **HFLDD)
    assert refused(distil(site, **many), "least-noise")


def test_noise_on_virtual_images_of_virtual_images_protects_no_sample(
    tmp_path: Path, begin: Any
) -> None:
    """Each sample is in all of those that were distilled first, and noise hid one of these."""
    site = Site(tmp_path / "open", OPEN)
    first = {"virtual__first_steps": 1, "virtual__per_class": 2, "train__on": "virtual"}
    begin(site, 7, strategy="hfldd", hfldd__dp_epsilon=3.0, hfldd__start="noise", **first)
    with pytest.raises(SettingsError, match="the samples behind them", check=at("train.on")):
        distil(site, **{"dp-epsilon": 3.0})
    site = Site(tmp_path / "hospital", HOSPITAL)  # whose server says so to nodes alone
    own = {"fedlgd__dp_epsilon": 3.0, "fedlgd__refine_steps": 0, "fedlgd__starts_from": "noise"}
    begin(site, 8, strategy="fedlgd", **own, **first)
    asked = {"per-class": 1, "first-steps": 2, "dp-epsilon": 3.0, "gradient": list[str]()}
    content = {"arrays": crafted(), "config": ConfigRecord(), "virtual": ConfigRecord(asked)}
    with pytest.raises(SettingsError, match="the samples behind them", check=at("train.on")):
        site.ask(TRAIN_VIRTUAL, RecordDict(dict(content)))


def test_noise_for_a_small_epsilon_is(tmp_path: Path, begin: Any) -> None:
    for name, policy in (("standard", STANDARD), ("noisy", NOISY)):
        site = Site(tmp_path / name, policy)
        begin(site, 7, **HFLDD)
        many = {"distilled-size": 200, "dp-epsilon": 9.0}
        assert epsilon(distil(site, **many)) == pytest.approx(9, abs=0.1)


@pytest.mark.parametrize(
    ("strategy", "message_type", "record", "value", "counts"),
    [
        ("hfldd", DISTILL, "config", {"dp-epsilon": 2.0}, True),
        ("hfldd", DISTILL, "route", {"dp-epsilon": 2.0}, False),
        ("feddm", DISTILL_AROUND, "other", {"dp-epsilon": 2.0}, False),
        # Of training this is a budget, and without noise it is never spent.
        ("feddm", DISTILL_AROUND, "config", {"dp-epsilon": 2.0}, False),
    ],
)
def test_an_epsilon_counts_only_where_the_app_adds_noise_for_it(
    strategy: str, message_type: str, record: str, value: dict[str, Any], counts: bool
) -> None:
    content = RecordDict({record: ConfigRecord(value)})
    request = MessageRequest.read(
        content, message_type=message_type, bundle="", run_config={"strategy": strategy}
    )
    assert request.virtual_epsilon == (2.0 if counts else 0.0)


def test_refined_virtual_data_of_a_resumed_run_do_not_leave_in_the_name_of_privacy(
    tmp_path: Path, begin: Any
) -> None:
    """They have no noise, and the account of a run that spent nothing said that they cost 0."""
    without_noise = {"distilled-size": 10, "distill-steps": 1, "dp-epsilon": 0.0}
    site = Site(tmp_path, OPEN)
    begin(site, 7, strategy="hfldd", hfldd__start="noise")
    assert distil(site, **without_noise).has_content()
    store = NodeStore.open(site.state_dir, 7, NODE)
    (name,) = (name for name in store.names() if name.startswith("distilled"))
    store.at(1).write(REFINED, store.read(name) or b"")  # as a refreshing run leaves it
    site = Site(tmp_path, NOISY.model_copy(update={"replies": "any", "most_epsilon": 10.0}))
    begin(site, 8, **HFLDD)
    assert resume(site, 7).has_content()
    assert epsilon(distil(site, **{"dp-epsilon": 2.0})) == pytest.approx(2, abs=0.1)
