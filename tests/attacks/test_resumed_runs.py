"""Runs that say that they resume others: what these have spent and kept is not to be had for less.

A server names the run that is resumed, and honest nodes take over its files.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Message, RecordDict

from flwr_distill.links.masks import public_bytes
from flwr_distill.node.policy import HOSPITAL, STANDARD
from flwr_distill.protocol.meeting import CONTINUE, DESCRIBE
from flwr_distill.storage.store import NodeStore
from flwr_distill.strategies.hfldd.method import DISTILL

from . import site as site_module
from .site import HFLDD, NODE, Site, account, refused

RECEIVER = X25519PrivateKey.generate()
REQUEST = {"distiller": "dm", "distilled-size": 10, "distill-steps": 5, "start": "noise"}


def distil(site: Site, **request: Any) -> Message:
    """Ask for virtual data, sealed for the server itself."""
    route = {
        **{"sender": str(NODE), "receiver": "9", "purpose": "virtual-data", "token": "a" * 32},
        **{"largest": 2**20, "peer-key": public_bytes(RECEIVER), "peer-name": "", "link": "relay"},
        **{"peer-certificate": b"", "peer-signature": b"", "permit": "", "address": ""},
    }
    records = {"config": ConfigRecord(REQUEST | request), "route": ConfigRecord(route)}
    return site.ask(DISTILL, RecordDict(dict(records)))


def resume(site: Site, run: int) -> Message:
    earlier = {"run-id": str(run), "node-id": str(NODE), "round": 5}
    return site.ask(CONTINUE, RecordDict({"config": ConfigRecord(earlier)}))


def epsilon(answer: Message) -> float:
    assert not answer.has_error(), answer.error
    return float(answer.content.metric_records["metrics"]["dp-epsilon"])


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begin a run of this id at a site."""

    def start(site: Site, run: int, **settings: Any) -> None:
        monkeypatch.setattr(site_module, "RUN", run)
        site.run(**settings)

    return start


def test_virtual_data_are_not_to_be_had_for_what_a_made_up_run_has_spent(
    tmp_path: Path, begin: Any
) -> None:
    """Refused for their epsilon, they lay there; then the run resumed another, and they left at 0.

    So any number of runs had a draw of their own noise.
    """
    site = Site(tmp_path, HOSPITAL)
    begin(site, 7, **HFLDD)
    assert epsilon(distil(site, **{"dp-epsilon": 9.0})) == pytest.approx(9, abs=0.1)
    for run in (8, 9):
        begin(site, run, **HFLDD)
        assert refused(distil(site, **{"dp-epsilon": 9.0}), "most-epsilon")
        with suppress(ValueError):
            resume(site, 1000 + run)
        assert refused(distil(site, **{"dp-epsilon": 9.0}), "most-epsilon")
    assert account(site) == pytest.approx(9, abs=0.1)


def test_no_chain_of_runs_leads_to_another_account(tmp_path: Path) -> None:
    """In a cycle of two, an even and an odd number of steps ended at different accounts."""
    first, second, third = (NodeStore.open(tmp_path, run, NODE) for run in (1, 2, 3))
    first.take_over("2", str(NODE), 0)
    with pytest.raises(ValueError, match="resumes this one"):
        second.take_over("1", str(NODE), 0)
    with pytest.raises(ValueError, match="resumes this one"):
        third.take_over("3", str(NODE), 0)
    with pytest.raises(ValueError, match="has started"):
        first.take_over("3", str(NODE), 0)
    assert first.take_over("2", str(NODE), 0) == 0  # a message that comes twice
    assert [store.origin for store in (first, second)] == [second, second]


@pytest.mark.parametrize("message_type", [DESCRIBE, CONTINUE])
def test_with_a_sandbox_no_run_of_another_bundle_says_that_it_resumes_a_run(
    tmp_path: Path, begin: Any, message_type: str
) -> None:
    """Its app would get the files of that run to see."""
    site = Site(tmp_path, STANDARD.model_copy(update={"sandbox": "required"}))

    def says(run: int, lr: float) -> str:
        """What the SuperLink gets where run `run` says that it resumes run 7."""
        begin(site, run, train__lr=lr)
        message = {"resumes": "7"} if message_type == DESCRIBE else {}
        if message_type == CONTINUE:
            message |= {"run-id": "7", "node-id": str(NODE), "round": 1}
        answer = site.ask(message_type, RecordDict({"config": ConfigRecord(message)}))
        return str(answer.error if answer.has_error() else answer.content)

    begin(site, 7, train__lr=0.1)
    site.ask(DESCRIBE, RecordDict())
    NodeStore.open(site.state_dir, 7, NODE).write("kept", b"of run 7")
    assert "refuses" not in says(8, 0.1)  # the same bundle
    assert "refuses it: sandbox: run 7" in says(9, 0.2)
