"""A node's files, and how a resumed run takes them up."""

import errno
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from flwr_distill.storage.store import (
    CONTINUES,
    MAX_WRITE,
    SECRET,
    SECRET_BYTES,
    SPENT,
    NodeStore,
    remove_old_runs,
)


@pytest.fixture
def store(tmp_path):
    return NodeStore.open(tmp_path, 1, 7)


def test_what_is_written_is_read_and_the_rest_is_not_there(store):
    store.write("a", b"1")
    store.write("a", b"2")
    assert (store.read("a"), store.read("b"), store.names()) == (b"2", None, ["a"])


def test_of_a_blob_of_rounds_the_last_is_read_and_the_two_before_stay(store):
    for server_round in (2, 8, 9, 10):
        store.at(server_round).write("a", str(server_round).encode())
    assert store.read("a") == b"10"
    assert store.names() == ["a@000008", "a@000009", "a@000010"]


def test_a_run_that_goes_on_takes_up_the_state_of_its_round(store, tmp_path):
    store.write("plain", b"p")
    for server_round in (4, 5):
        store.at(server_round).write("a", str(server_round).encode())
    (store.folder / "links").mkdir()
    (store.folder / "links" / "key").write_bytes(b"secret")
    after = NodeStore.open(tmp_path, 2, 8)
    assert after.take_over("1", "7", 4) == 2
    assert (after.read("plain"), after.read("a")) == (b"p", b"4")
    assert store.read("a") == b"5"  # as it was
    assert after.origin == store
    assert not (after.folder / "links").exists()
    after.at(5).write("a", b"other")
    assert (after.read("a"), store.read("a")) == (b"other", b"5")


def test_a_node_without_files_of_that_run_begins_anew(store):
    assert store.take_over("99", "7", 4) == 0


def test_runs_that_go_on_from_one_another_have_one_origin(store, tmp_path):
    store.write("a", b"1")
    second, third, fourth = (NodeStore.open(tmp_path, run_id, 9) for run_id in (2, 3, 4))
    second.take_over("1", "7", 0)
    third.take_over("1", "7", 0)  # the second died before it left a checkpoint
    fourth.take_over("3", "9", 0)
    assert [each.at(5).origin for each in (store, second, third, fourth)] == [store] * 4


def test_files_are_for_this_user_alone(store):
    store.write("a", b"1")
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((store.folder / "a").stat().st_mode) == 0o600


def test_a_write_that_breaks_off_leaves_what_was_there(store, tmp_path, monkeypatch):
    store.write("a", b"whole")
    store.at(3).write("b", b"whole")

    def killed(source, target, **folders):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        for broken in (store, store.at(4)):
            for name in ("a", "b"):
                with pytest.raises(KeyboardInterrupt):
                    broken.write(name, b"new")
    assert (store.read("a"), store.read("b")) == (b"whole", b"whole")
    assert sorted(path.name for path in store.folder.iterdir()) == ["a", "b@000003"]
    after = NodeStore.open(tmp_path, 2, 8)
    assert after.take_over("1", "7", 9) == 2


def test_blobs_of_the_last_round_that_counts_are_taken_over_and_no_later_ones(store, tmp_path):
    for server_round in (3, 4):
        store.at(server_round).write("a", str(server_round).encode())
    for last, taken in ((2, None), (3, b"3"), (4, b"4"), (5, b"4")):
        after = NodeStore.open(tmp_path, 10 + last, 8)
        after.take_over("1", "7", last)
        assert after.read("a") == taken


def test_a_full_disk_leaves_what_was_there_and_no_part_of_what_comes(store, monkeypatch):
    store.write("a", b"whole")

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            store.write("a", b"new")
    assert [path.name for path in store.folder.iterdir()] == ["a"]
    assert store.read("a") == b"whole"
    store.write("a", b"new")
    assert store.read("a") == b"new"


def test_what_a_power_cut_must_not_take_is_on_disk_before_its_name_and_the_name_before_the_end(
    store, monkeypatch
):
    store.write("a", b"old")
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda n: (synced.append(os.readlink(f"/proc/self/fd/{n}")), fsync(n))
    )
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda a, b, **folders: (synced.append("named"), replace(a, b, **folders))
    )
    store.write("a", b"new")
    content, named, folder = synced
    assert content.startswith(f"{store.folder}/.a.")
    assert (named, folder) == ("named", str(store.folder))


def test_what_need_not_outlast_a_power_cut_does_not_wait_for_the_disk(store, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: pytest.fail("waits for the disk"))
    lost = replace(store, durable=False)
    for files in (lost, lost.at(3), lost.below("links")):
        files.write("a", b"new")
        assert files.read("a") == b"new"


def test_old_runs_go_and_what_was_spent_of_a_budget_stays(tmp_path):
    old, resumed, fresh = (NodeStore.open(tmp_path, run_id, 7) for run_id in (1, 2, 3))
    old.write("model", b"large")
    old.write(SPENT, b"{}")
    (old.folder / "links" / "mailbox").mkdir(parents=True)
    (old.folder / "links" / "mailbox" / "parcel").write_bytes(b"uncollected")
    resumed.take_over("1", "7", 0)
    fresh.write("model", b"large")
    plain = NodeStore.open(tmp_path, 4, 7)
    plain.write("model", b"large")
    for store in (old, resumed, plain):
        for path in [store.folder.parent, store.folder, *store.folder.rglob("*")]:
            os.utime(path, (time.time() - 100, time.time() - 100))
    remove_old_runs(tmp_path, age=1000)
    assert old.read("model") == b"large"
    remove_old_runs(tmp_path, age=50)
    assert (old.names(), resumed.names(), fresh.names()) == ([SPENT], [CONTINUES, SPENT], ["model"])
    assert resumed.origin == old
    assert not plain.folder.parent.exists()


def test_what_a_killed_writer_left_is_removed_also_of_a_run_that_continues(store, tmp_path):
    store.write("model", b"large")
    left, written = store.folder / ".model.0123abcd", store.folder / ".model.4567abcd"
    for file in (left, written):
        file.write_bytes(b"lar")
    os.utime(left, (time.time() - 2 * MAX_WRITE,) * 2)
    os.utime(store.folder / "model", (time.time() - 2 * MAX_WRITE,) * 2)
    remove_old_runs(tmp_path, age=100_000)
    assert {file.name for file in store.folder.iterdir()} == {"model", written.name}


@pytest.mark.parametrize("damaged", [False, True])
def test_nodes_that_share_a_state_directory_have_one_secret_for_this_user_alone(tmp_path, damaged):
    if damaged:
        (tmp_path / SECRET).write_bytes(b"")
    stores = [NodeStore.open(tmp_path, run_id=1, node_id=node) for node in range(8)]
    with ThreadPoolExecutor(8) as pool:
        (secret,) = set(pool.map(NodeStore.secret, stores))
    assert len(secret) == SECRET_BYTES
    assert NodeStore.open(tmp_path, run_id=2, node_id=9).secret() == secret
    assert stat.S_IMODE((tmp_path / SECRET).stat().st_mode) == 0o600
