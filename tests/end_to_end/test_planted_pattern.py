"""What members send their heads is nowhere on the server: a known pattern is looked for there.

Three real nodes with data of their own run HFLDD and share raw data, so that pixels travel as they
are. Each node's images hold a random pattern of its own, and the search for it covers the
SuperLink's database files all through the run, every message that the ServerApp sends or gets, its
results and the SuperLink's log. The same search finds the patterns where sealing is taken out.
"""

import base64
import contextlib
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from flwr_distill.distill.packing import unpacked
from flwr_distill.fleet.local_federation import LocalFederation

from .runs import ROOT, complete, read

NODES, SIDE = 3, 8
PIXELS = np.random.default_rng(5).integers(256, size=(NODES, SIDE, SIDE), dtype=np.uint8)
"""Each node's pattern."""

pytestmark = pytest.mark.slow

RECORDING = '''
"""HFLDD that writes every message which the ServerApp sends or gets to a file."""

from flwr.common.serde import message_to_proto

from flwr_distill.strategies.hfldd import HFLDD

class RecordingGrid:
    def __init__(self, grid, file):
        self._grid, self._file = grid, file

    def __getattr__(self, name):
        return getattr(self._grid, name)

    def send_and_receive(self, messages, **settings):
        messages = list(messages)
        replies = list(self._grid.send_and_receive(messages, **settings))
        with open(self._file, "ab") as file:
            for message in (*messages, *replies):
                file.write(message_to_proto(message).SerializeToString())
        return replies

class Recording(HFLDD):
    def __init__(self, *, file, **settings):
        super().__init__(**settings)
        self._file = file

    def configure_train(self, server_round, arrays, config, grid):
        return super().configure_train(
            server_round, arrays, config, RecordingGrid(grid, self._file)
        )
'''

UNSEALED = """

from flwr_distill.distill.packing import packed, unpacked


def seal(payload, waybill, run_id, key):
    return unpacked(payload, 2**30)

def unseal(sealed, waybill, run_id, key):
    return packed(sealed)
"""


def encodings(pixels):
    """Looks of a pattern: its pixels, from 0 to 1 and as models get them; each raw and as text."""
    as_float = pixels.astype("<f4") / 255
    for raw in (pixels.tobytes(), as_float.tobytes(), ((as_float - 0.5) / 0.5).tobytes()):
        yield raw
        yield raw.hex().encode()
        for shift in range(3):  # base64 of something with the pattern in it, wherever it begins
            yield base64.b64encode(bytes(shift) + raw)[4:-4]


@pytest.fixture(scope="module")
def patterns():
    """Looks of each node's pattern."""
    return {node: tuple(encodings(pixels)) for node, pixels in enumerate(PIXELS)}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    for name in ("data", "site"):
        (folder / name).mkdir()
    (folder / "site" / "recording.py").write_text(RECORDING)
    generator = np.random.default_rng(6)
    for node, pixels in enumerate(PIXELS):
        images = generator.integers(256, size=(40, SIDE, SIDE), dtype=np.uint8)
        images[::2] = pixels
        images[1, 0, :2] = 0, 255  # the range, so that nothing is scaled on the way
        labels = np.full(len(images), node)
        np.savez(folder / "data" / f"node-{node}.npz", images=images, labels=labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder / "site"))
        with LocalFederation(
            NODES,
            folder / "state",
            data=sorted((folder / "data").iterdir()),
            direct_links=True,
            database=folder / "state" / "superlink.db",
        ) as running:
            yield running


@pytest.fixture(scope="module")
def unsealed_app(tmp_path_factory):
    """Our app, but parcels are not sealed."""
    folder = tmp_path_factory.mktemp("unsealed") / "unsealed"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "tests", "docs", "runs", "state")
    shutil.copytree(ROOT, folder, ignore=skipped)
    with (folder / "links" / "seal.py").open("a") as file:
        file.write(UNSEALED)
    return folder


def nodes_seen(patterns, paths):
    """Numbers of the nodes whose pattern is in any of the files."""
    contents = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # SQLite's own come and go
            contents.append(path.read_bytes())
    assert contents
    return {
        node
        for node, looks in patterns.items()
        if any(look in content for look in looks for content in contents)
    }


def run(federation, patterns, folder, app, links):
    """Run HFLDD; say whose patterns are where on the server, and who sent theirs."""
    settings = {
        "strategy": "recording:Recording",
        "strategy-args": json.dumps({"file": str(folder / "messages")}),
        "dataset": "private",
        "private.shape": f"1x{SIDE}x{SIDE}",
        "private.num-classes": NODES,
        "train.holdout": 0.0,
        "hfldd.groups": NODES,
        "hfldd.share-raw-data": True,
        "links": links,
        "num-rounds": 1,
    }
    in_database = set()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, federation, folder / "runs", settings, app)
        while not running.done():
            in_database |= nodes_seen(patterns, federation.state_dir.glob("superlink.db*"))
            time.sleep(0.1)
    results = running.result()
    (cluster,) = read(results, "topology")["clusters"]
    number = {f"node-{i}": i for i in range(NODES)}
    members = {number[name] for name in cluster["members"]}
    assert len(members) == NODES - 1
    head = federation.nodes[number[cluster["head"]]].state_dir / "runs" / results.name
    for place, parcel in enumerate(head.glob("*/parcel-*")):
        (folder / f"parcel-{place}").write_bytes(unpacked(parcel.read_bytes(), 2**30))
    assert nodes_seen(patterns, folder.glob("parcel-*")) == members  # they did travel
    return {
        "database": in_database,
        "messages": nodes_seen(patterns, [folder / "messages"]),
        "results": nodes_seen(patterns, (p for p in results.rglob("*") if p.is_file())),
        "log": nodes_seen(patterns, [federation.superlink_log]),
    }, members


@pytest.mark.parametrize("links", ["relay", "direct"])
def test_the_server_has_nothing_of_what_members_send(federation, patterns, tmp_path, links):
    found, _ = run(federation, patterns, tmp_path, ROOT, links)
    assert found == {"database": set(), "messages": set(), "results": set(), "log": set()}


def test_unsealed_the_same_search_finds_it(federation, patterns, tmp_path, unsealed_app):
    found, members = run(federation, patterns, tmp_path, unsealed_app, "relay")
    assert found["database"] == found["messages"] == members
