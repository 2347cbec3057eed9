"""A hostile app in the sandbox: what it writes, sends and plants reaches nothing outside.

The slow tests run real nodes. The others take the part of the app themselves.

Links lead to folders of the test alone: code that follows them deletes what is there.
"""

import functools
import hashlib
import json
import os
import pickle
import resource
import shutil
import stat
import struct
import subprocess
import sys
import threading
import time
import zipfile
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import Message, RecordDict
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run, RunNotRunningException

import flwr_distill.node.child
from flwr_distill.fleet.certificates import CertificateFolder
from flwr_distill.fleet.local_federation import LocalFederation
from flwr_distill.flower.app_config import run_config_of
from flwr_distill.flower.bundle import app_bundle
from flwr_distill.flower.guarding import Guarding
from flwr_distill.flower.steps import remove_links_of_ended_runs
from flwr_distill.links.errors import LinkError
from flwr_distill.links.folder import LinkFolder, remove_expired
from flwr_distill.node.bundle import BundleError, unpack
from flwr_distill.node.child import ChildDiedError
from flwr_distill.node.guard import Guard
from flwr_distill.node.policy import OPEN
from flwr_distill.node.run_records import RunRecordError, RunRecords
from flwr_distill.node.run_sandbox import Disk, RunSandboxes
from flwr_distill.node.sandbox import sandbox_command
from flwr_distill.node.settings import NodeError, NodeSettings
from flwr_distill.node.stock import is_another
from flwr_distill.node.supervisor import Node
from flwr_distill.storage.store import CONTINUES, SPENT, NodeStore, remove_old_runs
from tests.apps import pyproject
from tests.node.test_sandbox import SANDBOXED, needs_sandbox

ROOT = Path(__file__).resolve().parents[2]
OLD = time.time() - 1e7
BUNDLE, OTHER_BUNDLE = "a" * 64, "b" * 64


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def framed(content):
    return struct.pack("!i", len(content)) + content


# What the executor reads from a worker.


@pytest.fixture
def hostile_child(monkeypatch):
    """A child whose end of the stream the test has, and its descriptor."""
    ends = []

    def start(command, *, pass_fds, **_):
        ends.append(os.dup(pass_fds[0]))
        return SimpleNamespace(pid=0, returncode=-9)

    monkeypatch.setattr(flwr_distill.node.child, "start_bound", start)
    monkeypatch.setattr(flwr_distill.node.child, "kill_group", lambda process: None)
    child = flwr_distill.node.child.Child([])
    child.ready = True
    yield child, ends[0]
    os.close(ends[0])


def test_a_pickle_from_an_app_is_not_loaded_by_its_node(hostile_child, tmp_path):
    child, end = hostile_child
    os.write(end, framed(pickle.dumps(Bomb(tmp_path / "escaped"))))
    with pytest.raises(ChildDiedError, match=r"malformed \(a note is not JSON\)"):
        child.note(timeout=5)
    assert not (tmp_path / "escaped").exists()


def note(*values):
    return framed(json.dumps(values).encode())


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"\x7f\xff\xff\xff", id="two gigabytes"),
        pytest.param(framed(b"[" * 50_000), id="deep"),
        pytest.param(framed(b'{"kind": "done"}'), id="no list"),
        pytest.param(note("done"), id="too short"),
        pytest.param(note("dead", 0, ""), id="unknown kind"),
        pytest.param(note("failed", "1", ""), id="text as a number"),
        pytest.param(note("failed", 1 << 70, ""), id="huge number"),
        pytest.param(note("failed", 1, "\ud800"), id="no UTF-8"),
        pytest.param(note("ready", 0, "cuda:0"), id="a second beginning"),
        pytest.param(note("unfit", 0, "ends the node"), id="unfit after the beginning"),
    ],
)
def test_a_malformed_note_costs_the_app_its_process_and_the_node_nothing(hostile_child, sent):
    child, end = hostile_child
    os.write(end, sent)
    with pytest.raises(ChildDiedError, match="malformed"):
        child.note(timeout=5)


def test_half_a_note_holds_the_node_up_no_longer_than_silence(hostile_child):
    child, end = hostile_child
    os.write(end, note("done", 0, "")[:9])
    start = time.monotonic()
    with pytest.raises(ChildDiedError, match="hung"):
        child.note(timeout=0.3)
    assert time.monotonic() - start < 5


# What other processes read, write and remove below `runs`.


@pytest.fixture
def photos(tmp_path):
    """The owner's images, which nobody has changed for months."""
    album = tmp_path / "photos" / "7"
    (album / "links" / "mailbox").mkdir(parents=True)
    for number in range(30):
        for folder in (album, album / "links" / "mailbox"):
            (folder / f"{number}.png").write_bytes(b"an image")
    for path in [tmp_path / "photos", *(tmp_path / "photos").rglob("*")]:
        os.utime(path, (OLD, OLD))
    return tmp_path / "photos"


def images(folder):
    return sum(path.is_file() for path in folder.rglob("*"))


@pytest.fixture
def state(tmp_path):
    folder = tmp_path / "state"
    (folder / "runs" / "1").mkdir(parents=True)
    (folder / "lasting").mkdir()
    return folder


PLANTED = {
    "a run": ("runs/2", "photos"),
    "a node": ("runs/1/7", "photos/7"),
    "links": ("runs/1/8/links", "photos/7/links"),
    "a mailbox": ("runs/1/8/links/mailbox", "photos/7/links/mailbox"),
    "what lasts": ("lasting/features", "photos/7"),
}


def plant(state, name, target):
    """Put a link below `runs`, as old as the images."""
    link = state / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    os.utime(link, (OLD, OLD), follow_symlinks=False)


def ended(run_id):
    raise RunNotRunningException


@pytest.mark.parametrize("name", PLANTED)
def test_no_sweep_follows_a_link_of_an_app(state, photos, name):
    link, target = PLANTED[name]
    plant(state, link, photos.parent / target)
    remove_expired(state, 10)
    remove_links_of_ended_runs(state, ended)
    remove_old_runs(state, 10)
    assert images(photos) == 60


@pytest.mark.parametrize("name", ["runs/x/7/links", "runs/1/y/links", "runs/²/7/links"])
def test_no_name_of_an_app_ends_the_supernode(state, name):
    (state / name).mkdir(parents=True)
    queried = []
    remove_links_of_ended_runs(state, queried.append)
    assert queried == ([1] if name.startswith("runs/1/") and queried else [])


def test_folders_of_any_depth_are_removed_in_bounded_space(state):
    folder = os.open(state / "runs" / "1", os.O_RDONLY)
    for name in ["7", *["d" * 200] * 2_000]:
        os.mkdir(name, dir_fd=folder)
        deeper = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = deeper
    os.close(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        remove_old_runs(state, -10)  # all of it
        assert not (state / "runs" / "1").exists()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        subprocess.run(["rm", "-rf", state], check=True)  # pytest cannot remove it


def test_the_guard_reads_no_key_through_a_link_or_from_a_pipe(state, tmp_path):
    (tmp_path / "other").write_bytes(b"k" * 32)
    links = state / "runs" / "1" / "7" / "links"
    links.mkdir(parents=True)
    folder = LinkFolder(NodeStore.open(state, 1, 7))
    read = []

    def attempt():
        try:
            read.append(folder.private_key().private_bytes_raw())
        except OSError:
            read.append(b"")

    (links / "key").symlink_to(tmp_path / "other")
    attempt()
    (links / "key").unlink()
    os.mkfifo(links / "key")
    waiting = threading.Thread(target=attempt, daemon=True)
    waiting.start()
    waiting.join(timeout=10)
    assert not waiting.is_alive()
    assert len(read) == 2
    assert b"k" * 32 not in read
    assert (tmp_path / "other").read_bytes() == b"k" * 32


def test_a_parcel_is_not_put_behind_a_link(state, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder = LinkFolder(NodeStore.open(state, 1, 7))
    plant(state, "runs/1/7/links/mailbox", tmp_path / "elsewhere")
    with pytest.raises((OSError, LinkError)):
        folder.put("0" * 32, [b"parcel"], 6, hashlib.sha256(b"parcel").hexdigest())
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("resumed", [b"1/7", b"../../../photos/7", b"1/7/../7", b"\xff", b"9" * 99])
def test_a_chain_of_runs_that_an_app_made_up_has_an_end_below_runs(state, resumed):
    store = NodeStore.open(state, 1, 7)
    store.write(CONTINUES, resumed)
    assert store.origin.folder.parent.parent == state / "runs"


def test_what_was_spent_of_a_budget_stays_though_an_app_put_links_beside_it(state, photos):
    store = NodeStore.open(state, 1, 7)
    store.write(SPENT, b"{}")
    plant(state, "runs/1/7/model", photos / "7" / "0.png")
    for path in (store.folder, store.folder / SPENT):
        os.utime(path, (OLD, OLD))
    remove_old_runs(state, 10)
    assert os.listdir(store.folder) == [SPENT]
    assert images(photos) == 60


# What is in the sandbox.

PROBE = """
import json, os, sys
from pathlib import Path

def tried(action):
    try:
        return action()
    except OSError as error:
        return type(error).__name__

wanted = json.loads(sys.argv[1])
for link, target in wanted["links"]:
    tried(lambda: os.symlink(target, link))
print(json.dumps({
    **{path: tried(lambda: len(Path(path).read_bytes()) > 0) for path in wanted["read"]},
    **{path: tried(lambda: Path(path).write_text("!")) for path in wanted["write"]},
    "listed": tried(lambda: sorted(os.listdir(wanted["root"]))),
    "runs": __import__("flwr_distill.flower.worker").__name__,
}))
"""


def python(code, *arguments, inside=()):
    """The output of a Python process that ends well, `inside` a sandbox's command."""
    command = [*inside, sys.executable, "-P", "-c", code, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def probe(settings, run_id=1, bundle=BUNDLE, **wanted):
    wanted = {"read": [], "write": [], "links": [], "root": "/"} | wanted
    sandboxes = RunSandboxes(sandbox_command(settings, dict(os.environ)), settings.state_dir, None)
    inside = sandboxes.of_run(run_id, bundle).command
    return json.loads(python(PROBE, json.dumps(wanted, default=str), inside=inside))


@needs_sandbox
def test_of_a_checkout_packages_alone_are_in_the_sandbox(state, monkeypatch):
    own = [path for path in sys.path if not Path(path).is_relative_to(ROOT / "tests")]
    monkeypatch.setattr(sys, "path", own)  # other tests in this process may have added to it
    seen = probe(
        NodeSettings(state_dir=state, policy=SANDBOXED),
        root=ROOT,
        read=[ROOT / "pyproject.toml", ROOT / "certs" / "ca.key", ROOT / "node" / "child.py"],
        write=[ROOT / "node" / "child.py"],
    )
    assert seen[str(ROOT / "pyproject.toml")] == "FileNotFoundError"
    assert seen[str(ROOT / "certs" / "ca.key")] == "FileNotFoundError"
    assert seen[str(ROOT / "node" / "child.py")] == "OSError"  # read-only
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    prefix = Path(sys.prefix)  # of a virtual environment in the checkout
    inside = {prefix.relative_to(ROOT).parts[0]} if ROOT in prefix.parents else set()
    assert set(seen["listed"]) == packages | {"baselines"} | inside  # a package in a folder
    assert seen["runs"] == "flwr_distill"


@needs_sandbox
def test_a_link_that_a_sandboxed_app_plants_leads_no_sweep_outside(state, photos):
    run = state / "runs" / "1"
    settings = NodeSettings(state_dir=state, policy=SANDBOXED)
    probe(settings, links=[(str(run / "5"), str(photos)), (str(run / "6"), str(photos))])
    assert sorted(os.listdir(run)) == ["5", "6"]
    remove_links_of_ended_runs(state, ended)
    remove_old_runs(state, -10)  # all of it
    assert images(photos) == 60
    assert os.listdir(state / "runs") == []


# Other runs' files.


def kept_by(state, run_id, bundle):
    """What a run has kept on a node, and the folders in which that is; inside and outside."""
    folders = state / "runs" / str(run_id) / "7", state / "lasting" / bundle
    files = [folder / "kept" for folder in folders]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_text(f"of run {run_id}")
    return files


@needs_sandbox
def test_an_app_sees_and_writes_the_files_of_its_own_run_alone(state):
    first = kept_by(state, 1, BUNDLE)
    second = kept_by(state, 2, OTHER_BUNDLE)
    mine = [second[0], state / "lasting" / "kept"]
    planted = [state / "runs" / "3", state / "runs" / "1" / "new", state / "lasting" / BUNDLE]
    seen = probe(
        NodeSettings(state_dir=state, policy=SANDBOXED),
        run_id=2,
        bundle=OTHER_BUNDLE,
        root=state / "runs",
        read=[*first, *mine],
        write=[*planted, second[0].parent / "new"],
    )
    assert seen["listed"] == ["2"]
    assert {seen[str(path)] for path in first} == {"FileNotFoundError"}
    assert {seen[str(path)] for path in mine} == {True}
    assert seen[str(second[0].parent / "new")] == 1
    assert sorted(os.listdir(state / "runs")) == ["1", "2"]
    assert {path.read_text() for path in first} == {"of run 1"}
    assert os.listdir(state / "lasting" / BUNDLE) == ["kept"]


@needs_sandbox
def test_a_run_sees_the_files_of_the_run_that_it_resumes(state):
    (file, _) = kept_by(state, 1, BUNDLE)
    records, settings = RunRecords(state), NodeSettings(state_dir=state, policy=SANDBOXED)
    records.note(1, BUNDLE)
    records.note(2, BUNDLE, resumes=1)
    records.note(3, BUNDLE, resumes=2)
    seen = probe(settings, run_id=3, read=[file], write=[file.parent / "new"], root=state / "runs")
    assert (seen[str(file)], seen[str(file.parent / "new")]) == (True, 1)
    assert seen["listed"] == ["1", "2", "3"]


def test_no_run_of_another_bundle_resumes_a_run_to_see_its_files(state):
    kept_by(state, 4, BUNDLE)
    records = RunRecords(state)
    records.note(6, BUNDLE)
    for run_id in (6, 4):  # of 4 there is no record
        with pytest.raises(RunRecordError, match=f"run {run_id} was of"):
            records.note(7, OTHER_BUNDLE, resumes=run_id)
    with pytest.raises(RunRecordError, match="run 6 began with app bundle"):
        records.note(6, OTHER_BUNDLE)
    records.note(7, OTHER_BUNDLE, resumes=8)  # which was not here, and is of the same bundle now
    with pytest.raises(RunRecordError, match="run 8 began with app bundle"):
        records.note(8, BUNDLE)
    with pytest.raises(RunRecordError, match="run 7 resumes run 8 already"):
        records.note(7, OTHER_BUNDLE, resumes=9)
    assert records.shared(7, OTHER_BUNDLE) == [7, 8]
    assert records.shared(7, BUNDLE) == [7]


def test_runs_that_resume_each_other_have_an_end(state):
    records = RunRecords(state)
    records.note(1, BUNDLE, resumes=2)
    records.note(2, BUNDLE, resumes=1)
    assert records.shared(1, BUNDLE) == [1, 2]


def test_records_of_runs_whose_files_are_gone_are_removed(state):
    records = RunRecords(state)
    records.note(1, BUNDLE)
    records.note(2, BUNDLE)
    records.remove_old(10)
    assert sorted(os.listdir(state / "run-records")) == ["1", "2"]
    records.remove_old(-10)
    assert os.listdir(state / "run-records") == ["1"]  # there is runs/1


def test_a_folder_that_a_sandbox_has_had_made_is_not_swept(state):
    os.utime(state / "runs" / "1", (OLD, OLD))
    sandbox = RunSandboxes([], state, None).of_run(1, BUNDLE)
    remove_old_runs(state, 10)
    assert all(mount.source.is_dir() for mount in sandbox.mounts)
    remove_old_runs(state, -10)
    assert not any(mount.source.is_dir() for mount in sandbox.mounts)


def test_no_sandbox_mounts_what_a_link_leads_to(state, photos):
    plant(state, "runs/2", photos)
    with pytest.raises(OSError, match=r"Too many levels|Not a directory"):
        RunSandboxes([], state, None).of_run(2, BUNDLE)
    with pytest.raises(OSError, match="not the SHA-256"):
        RunSandboxes([], state, None).of_run(1, "../../photos")


# Disk space.


def grow(folder):
    (folder / "large").write_bytes(b"x" * 200_000)


def dig(folder):
    for _ in range(40):
        folder = folder / "d"
        folder.mkdir()


def lock(folder):
    (folder / "locked").mkdir()
    grow(folder / "locked")
    (folder / "locked").chmod(0)


def hide(folder):
    (folder / ".a" / "b").mkdir(parents=True)
    grow(folder / ".a" / "b")


def scatter(folder):
    for number in range(40):
        (folder / str(number)).write_bytes(b"x" * 4_000)


@pytest.mark.parametrize("fill", [grow, dig, hide, scatter, lock])
def test_what_an_app_keeps_is_bounded_however_it_lies_there(state, fill):
    if fill is lock and os.geteuid() == 0:
        pytest.skip("root opens all folders")
    folder = state / "runs" / "1"
    (folder / "small").write_bytes(b"x" * 1_000)
    disk = functools.partial(Disk, state, [folder, state / "lasting"], 100_000)
    assert not disk().excess()
    fill(folder)
    assert "most-disk" in disk().excess()


def test_an_app_whose_folder_the_nodes_owner_removes_is_ended_and_its_node_is_not(state):
    folder = state / "runs" / "1"
    disk = Disk(state, [folder], 100_000)
    shutil.rmtree(folder)
    assert "was removed: runs/1" in disk.excess()


def test_a_sparse_file_counts_by_what_it_takes(state):
    with (state / "runs" / "1" / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert not Disk(state, [state / "runs" / "1"], 100_000).excess()


def test_without_a_number_a_run_may_keep_a_share_of_the_disk(state, monkeypatch):
    folder = state / "runs" / "1"
    free = 1_000_000
    monkeypatch.setattr(Disk, "_free", lambda self: free)
    monkeypatch.setattr("flwr_distill.node.run_sandbox.MEASURED_EVERY", 0)
    disk = Disk(state, [folder], None)
    assert not disk.excess()
    grow(folder)
    assert not disk.excess()
    free = 400_000  # what is deleted and open is in no folder
    assert "left" in disk.excess()
    free = 600_000
    (folder / "large").write_bytes(b"x" * 300_000)
    assert "over 250,000" in disk.excess()


@pytest.fixture
def keys(tmp_path):
    """Two keys in a folder of a node, in the format of each use."""
    authority = CertificateFolder(tmp_path / "certs")
    authority.create(30)
    authority.issue_node("ward-3", [], 20)
    return tmp_path / "certs"


def node_with(keys, state, **settings):
    files = {
        "root_certificates": keys / "ca.crt",
        "peer_authority": keys / "nodes-ca.crt",
        "peer_certificate": keys / "ward-3" / "node.crt",
        "peer_key": keys / "ward-3" / "node.key",
        "auth_key": keys / "ward-3" / "login.key",
    }
    return NodeSettings(state_dir=state, policy=SANDBOXED, **files | settings)


@needs_sandbox
def test_the_key_for_the_superlink_is_not_in_the_sandbox(keys, state):
    settings = node_with(keys, state)
    seen = probe(settings, read=[settings.peer_key, settings.peer_authority, settings.auth_key])
    assert seen[str(settings.peer_key)] is seen[str(settings.peer_authority)] is True
    assert seen[str(settings.auth_key)] == "FileNotFoundError"


@pytest.mark.parametrize(
    "case", ["one key", "a readable folder", "data beside it", "state in data"]
)
def test_a_node_whose_app_could_read_its_login_key_does_not_start(keys, state, case, monkeypatch):
    monkeypatch.setattr("flwr_distill.node.supervisor.why_no_sandbox", str)
    own = keys / "ward-3"
    if case == "one key":
        settings = node_with(keys, state, auth_key=own / "node.key")
    elif case == "a readable folder":
        settings = node_with(keys, state)
        policy = settings.policy.model_copy(update={"readable": [str(own)]})
        settings = settings.model_copy(update={"policy": policy})
    elif case == "data beside it":
        settings = node_with(keys, state, data=own)
    else:
        settings = node_with(keys, state, data=state.parent)
    with pytest.raises(NodeError, match=r"auth-key=|state directory"):
        Node(settings)._decide_on_sandbox()
    Node(node_with(keys, state))._decide_on_sandbox()


# Bundles.


def archive(files, method=zipfile.ZIP_DEFLATED, **attributes):
    content = BytesIO()
    with zipfile.ZipFile(content, "w", method) as file:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = method
            for key, value in attributes.items():
                setattr(entry, key, value)
            file.writestr(entry, data)
    return content.getvalue()


def lying(content, size):
    """The archive, whose list says that its only file unpacks to this size."""
    at = content.index(b"PK\x01\x02") + 24
    return content[:at] + size.to_bytes(4, "little") + content[at + 4 :]


def written(folder, name, content):
    (folder / name).write_bytes(content)
    return folder / name


PYPROJECT = pyproject("tiny")
GOOD = archive({"pyproject.toml": PYPROJECT})
BOMB = PYPROJECT.encode() + b"#" * 150_000_000
BAD = {
    "a bomb": lambda: archive({"pyproject.toml": BOMB}),
    "a bomb that lies": lambda: lying(archive({"pyproject.toml": BOMB}), 500),
    "a bomb of two methods": lambda: archive({"pyproject.toml": BOMB}, zipfile.ZIP_BZIP2),
    "a bomb beside it": lambda: archive({"pyproject.toml": PYPROJECT, "big.py": BOMB}),
    "many files": lambda: archive(
        {"pyproject.toml": PYPROJECT} | {f"{n}.py": "" for n in range(9000)}
    ),
    "deep": lambda: archive({"pyproject.toml": PYPROJECT, "a/" * 40 + "b.py": ""}),
    "up": lambda: archive({"pyproject.toml": PYPROJECT, "../../../escaped": "x"}),
    "absolute": lambda: archive({"pyproject.toml": PYPROJECT, "/tmp/escaped": "x"}),
    "a link": lambda: archive(
        {"pyproject.toml": PYPROJECT, "out": "/tmp/elsewhere"},
        external_attr=(stat.S_IFLNK | 0o777) << 16,
    ),
    "a file as a folder": lambda: archive({"pyproject.toml": PYPROJECT, "a": "", "a/b.py": ""}),
    "settings without end": lambda: archive({"pyproject.toml": "a." * 100_000 + "a = 1"}),
    "nothing": lambda: b"PK",
}


@functools.cache
def bad(kind):
    return BAD[kind]()


GUARD = """
import hashlib, resource, sys
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run
from flwr_distill.flower.app_config import run_config_of
from flwr_distill.flower.guarding import Guarding
from flwr_distill.flower.task_identity import identify
from flwr_distill.node.guard import Guard
from flwr_distill.node.policy import OPEN

identify(1, 7, 5)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def admit(content):
    run = Run.create_empty(7)
    run.override_config = {}
    bundle = Fab(hashlib.sha256(content).hexdigest(), content, {})
    message = Message(RecordDict(), 5, "train")
    message.metadata.__dict__.update(_run_id=7, _message_id="1" * 64)
    return guard.admit(message, run, bundle)

guard = Guarding(Guard(OPEN, Path(sys.argv[1]), {}, run_config_of))
assert admit(Path(sys.argv[2]).read_bytes()) is None
before = peak()
for file in sys.argv[3:]:
    answer = admit(Path(file).read_bytes())
    reason = "" if answer is None else answer.error.reason
    print(Path(file).name, "refused" if "the app bundle" in reason else "not refused", reason[:200])
print("MiB", peak() - before)
"""


def test_the_guard_opens_no_bomb_and_takes_little_memory_to_see_it(tmp_path):
    files = [written(tmp_path, "good", GOOD), *(written(tmp_path, k, bad(k)) for k in BAD)]
    *refusals, memory = python(GUARD, tmp_path / "state", *files).splitlines()
    assert len(refusals) == len(BAD)
    assert not [line for line in refusals if "not refused" in line]
    assert int(memory.removeprefix("MiB ")) < 100


SUPERLINK = """
import resource, sys
from pathlib import Path
from flwr_distill.flower.line_1_32.fleet import linkstate
from flwr.superlink.servicer.control import control_servicer

linkstate.app.run_superlink = lambda: None
linkstate.main()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    control_servicer.get_fab_config(Path(sys.argv[1]).read_bytes())
except ValueError as error:  # which the servicer turns into a refusal
    print(error)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
control_servicer.get_fab_config(Path(sys.argv[2]).read_bytes())
"""


@pytest.mark.skipif(is_another(), reason="is about the SuperLink of Flower 1.32")
def test_a_superlink_opens_no_bomb_either(tmp_path):
    files = written(tmp_path, "bomb", bad("a bomb")), written(tmp_path, "good", GOOD)
    assert "unpack to" in python(SUPERLINK, *files)


@pytest.mark.parametrize("kind", BAD)
def test_of_a_bad_bundle_nothing_is_written(kind, tmp_path):
    with pytest.raises(BundleError):
        unpack(bad(kind), tmp_path / "bundles")
    assert not [path for path in (tmp_path / "bundles").rglob("*") if path.is_file()]
    assert not Path("/tmp/escaped").exists()


def test_a_bundle_that_the_owner_has_not_named_is_not_opened(tmp_path, monkeypatch):
    def opened(*_, **__):
        raise AssertionError("it was opened")

    bundle = Fab(hashlib.sha256(GOOD).hexdigest(), GOOD, {})
    run = Run.create_empty(7)
    message = Message(RecordDict(), 5, "train")
    message.metadata.__dict__.update(_run_id=7, _message_id="1" * 64)
    policy = OPEN.model_copy(update={"bundles": ["0" * 64]})
    guard = Guarding(Guard(policy, tmp_path, {}, run_config_of))
    monkeypatch.setattr(zipfile, "ZipFile", opened)
    answer = guard.admit(message, run, bundle)
    assert "bundles: the app bundle" in answer.error.reason
    monkeypatch.undo()
    renamed = Fab("0" * 64, GOOD, {})
    monkeypatch.setattr(zipfile, "ZipFile", opened)
    assert "SHA-256 is" in guard.admit(message, run, renamed).error.reason


# A real node.

CLIENT = """
import json, os, pickle, struct, sys
from pathlib import Path
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

class Bomb:
    def __init__(self, marker):
        self.marker = marker
    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)

def tried(action):
    try:
        action()
        return "yes"
    except OSError as error:
        return type(error).__name__

TROJAN = {
    "pyproject.toml": PYPROJECT,
    "honest/__init__.py": "",
    "honest/client.py": Path(__file__).read_text(),
}

def plant(folder):
    for name, text in TROJAN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

@app.train()
def train(message: Message, context: Context) -> Message:
    do = json.loads(message.content["config"]["do"])
    home = Path(os.environ["FLWR_HOME"])
    state = Path(context.node_config["state-dir"])
    report = {"i am": NAME}
    if do.get("bundle"):
        for folder in (home / "apps" / f"tests.honest-app.1.0.0.{do['bundle'][:8]}",
                       home / "bundles" / do["bundle"]):
            report[folder.parent.name] = tried(lambda: plant(folder))
    if do.get("photos"):
        report["link"] = tried(lambda: os.symlink(do["photos"], state / "runs" / "77"))
        report["own link"] = tried(
            lambda: os.symlink(do["photos"], state / "runs" / str(context.run_id) / "8")
        )
    own = state / "runs" / str(context.run_id) / "7"
    own.mkdir(parents=True, exist_ok=True)
    (own / "kept").write_text(NAME)
    report["runs"] = sorted(os.listdir(state / "runs"))
    report["run"] = str(context.run_id)
    report["code"] = len(os.listdir(home / "bundles"))
    report["others"] = tried(lambda: [(state / "runs" / run / "7" / "kept").read_text()
                                    for run in do.get("others", [])])
    for line in do.get("lines", []):
        os.write(1, line.encode())
    if do.get("fill"):
        (own / "large").write_bytes(b"x" * do["fill"])
        import time
        time.sleep(30)
    if do.get("marker"):
        number = int(sys.argv[sys.argv.index("--notes-fd") + 1])
        bomb = pickle.dumps(Bomb(do["marker"]))
        os.write(number, struct.pack("!i", len(bomb)) + bomb)
        import time
        time.sleep(5)
    answer = ConfigRecord({"report": json.dumps(report)})
    return Message(RecordDict({"answer": answer}), reply_to=message)
"""

SERVER = """
import time
GROUP = "1]\\nFORGED by a message\\x1b[2K"
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    content = RecordDict({"config": ConfigRecord({"do": context.run_config["do"]})})
    message = Message(content, dst_node_id=nodes[0], message_type="train", group_id=GROUP)
    (sent,) = grid.push_messages([message])
    while not (replies := list(grid.pull_messages([sent]))):
        time.sleep(0.05)
    (reply,) = replies
    print("REPORT", reply.error.reason if reply.has_error() else reply.content["answer"]["report"])
"""


def write_app(folder, name):
    constants = f"NAME = {name!r}\nPYPROJECT = {pyproject('honest')!r}\n"
    code = {"__init__.py": "", "client.py": constants + CLIENT, "server.py": SERVER}
    (folder / name).mkdir(parents=True)
    (folder / "pyproject.toml").write_text(pyproject(name, 'do = ""'))
    for file, text in code.items():
        (folder / name / file).write_text(text)
    return folder


@pytest.mark.deployment("a hostile app in its sandbox")
@needs_sandbox
@pytest.mark.slow
def test_a_hostile_run_in_the_sandbox_of_a_real_node_changes_nothing_outside(tmp_path, photos):
    trojan = write_app(tmp_path / "trojan", "trojan")
    honest = write_app(tmp_path / "honest", "honest")
    marker = tmp_path / "escaped"
    attack = {
        "bundle": hashlib.sha256(app_bundle(honest)).hexdigest(),
        "photos": str(photos),
        "lines": ["\nFORGED by ", "an app\x1b[2K\n"],
    }

    def run(federation, app, do):
        outcome = federation.run(app, {"do": json.dumps(do)}, timeout=150)
        assert outcome.completed, "\n".join(outcome.lines)
        (line,) = [line for line in outcome.lines if line.startswith("REPORT ")]
        return line.removeprefix("REPORT ")

    policy = {"extends": "open", **SANDBOXED, "most-disk": 2_000_000}
    settings = {"preload": [], "keep-runs": 1e-3, "policy": policy}
    with LocalFederation(1, tmp_path / "federation", node_settings=settings) as federation:
        before = json.loads(run(federation, honest, {}))
        attack["others"] = [before["run"]]
        planted = json.loads(run(federation, trojan, attack))
        assert planted["link"] == "OSError"  # read-only
        assert planted["own link"] == "yes"
        assert planted["bundles"] == "OSError"
        assert planted["runs"] == [planted["run"]]
        assert planted["others"] == "FileNotFoundError"
        assert planted["code"] == 1
        assert "most-disk" in run(federation, trojan, {"fill": 4_000_000})
        died = run(federation, trojan, {"marker": str(marker)})
        assert "malformed" in died
        report = json.loads(run(federation, honest, {}))
        node = federation.nodes[0]
        status = json.loads((node.state_dir / "node.json").read_text())
        log = node.log.read_text(errors="replace")
    assert report["i am"] == "honest"
    assert not marker.exists()
    assert images(photos) == 60
    assert status["starts"] == 1  # neither SuperNode nor executor had to start again
    assert f"app of run {planted['run']}: FORGED by an app" in log
    assert not [line for line in log.splitlines() if line.startswith("FORGED")]
    assert "FORGED by a message" in log
    assert "\x1b[2K" not in log
