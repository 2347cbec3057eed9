"""When a run has ended, what others sent to a node for it goes."""

from pathlib import Path
from typing import Any

import pytest
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import start_client_internal

from links.folder import LinkFolder
from links.store import NodeStore
from node.run_ends import patch_run_ends, remove_links_of_ended_runs

ENDED, RUNNING, UNKNOWN = 2**63 + 1, 2, 3


def get_run(run_id: int) -> object:
    """As a SuperNode asks its SuperLink."""
    if run_id == ENDED:
        raise RunNotRunningException
    if run_id == UNKNOWN:
        raise ConnectionError
    return object()


@pytest.fixture
def links(tmp_path: Path) -> dict[int, Path]:
    """Folder of a node's links in each run, with a parcel that nobody collected."""
    folders = {}
    for run_id in (ENDED, RUNNING):
        store = NodeStore.open(tmp_path, run_id, 7)
        store.write("model", b"kept")
        LinkFolder(store).private_key()
        folders[run_id] = store.folder / "links"
        (folders[run_id] / "mailbox").mkdir()
        (folders[run_id] / "mailbox" / "parcel").write_bytes(b"uncollected")
    return folders


def test_what_a_run_that_has_ended_left_in_the_mailbox_goes(links: dict[int, Path]) -> None:
    remove_links_of_ended_runs(links[ENDED].parents[3], get_run)
    assert not links[ENDED].exists()
    assert (links[ENDED].parent / "model").exists()
    assert (links[RUNNING] / "mailbox" / "parcel").exists()


def test_a_superlink_that_cannot_say_changes_nothing(tmp_path: Path) -> None:
    store = NodeStore.open(tmp_path, UNKNOWN, 7)
    LinkFolder(store).private_key()
    remove_links_of_ended_runs(tmp_path, get_run)
    assert (store.folder / "links" / "key").exists()


def test_the_supernodes_loop_asks_now_and_then(
    links: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def intake(*, get_run: Any, state: str) -> int:
        return len(state)

    def asking(run_id: int) -> object:
        asked.append(run_id)
        return get_run(run_id)

    monkeypatch.setattr(start_client_internal, "_pull_and_store_message", intake)
    assert patch_run_ends(links[ENDED].parents[3], every=0.0)
    pull: Any = start_client_internal._pull_and_store_message
    assert pull(get_run=asking, state="abc") == 3
    assert sorted(asked) == [RUNNING, ENDED]
    assert not links[ENDED].exists()
    monkeypatch.setattr(start_client_internal, "_pull_and_store_message", intake)
    assert patch_run_ends(links[ENDED].parents[3], every=60.0)
    pull = start_client_internal._pull_and_store_message
    assert pull(get_run=asking, state="abc") == 3
    assert len(asked) == 2
