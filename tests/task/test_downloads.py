"""Nodes that download a data set into one folder at a time."""

import gzip
import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torchvision

from flwr_distill.task.datasets import load_dataset

NODES = 3
PARTS = {"train": 200, "t10k": 10}
PAUSE = 0.2
"""Seconds between the halves of a file."""


def idx(values: np.ndarray) -> bytes:
    sizes = np.array(values.shape, ">i4").tobytes()
    return gzip.compress(b"\0\0\x08" + bytes([values.ndim]) + sizes + values.tobytes())


@pytest.fixture
def mirror(monkeypatch):
    """A slow mirror of a little MNIST on this machine; gives an event, set in its last file."""
    draws = np.random.default_rng(0)
    files, in_last_file = {}, threading.Event()
    for part, number in PARTS.items():
        images = draws.integers(0, 256, (number, 28, 28), dtype=np.uint8)
        files[f"{part}-images-idx3-ubyte.gz"] = idx(images)
        files[f"{part}-labels-idx1-ubyte.gz"] = idx(np.arange(number, dtype=np.uint8) % 10)

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self):
            content = files[self.path.strip("/")]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            half = len(content) // 2
            self.wfile.write(content[:half])
            if self.path.strip("/") == list(files)[-1]:
                in_last_file.set()
            time.sleep(PAUSE)
            self.wfile.write(content[half:])

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    mnist = torchvision.datasets.MNIST
    monkeypatch.setattr(mnist, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
    known = [(name, hashlib.md5(data).hexdigest()) for name, data in files.items()]
    monkeypatch.setattr(mnist, "resources", known)
    yield in_last_file
    server.shutdown()
    server.server_close()
    thread.join()


def test_three_nodes_that_download_into_one_folder_read_whole_files(mirror, tmp_path):
    def node(number):
        if number == NODES - 1:  # it comes when the others have part of every file
            assert mirror.wait(20)
            time.sleep(PAUSE / 2)
        return load_dataset("mnist", tmp_path, download=True).train

    with ThreadPoolExecutor(NODES) as nodes:
        first, *others = nodes.map(node, range(NODES))
    assert len(first) == PARTS["train"]
    for other in others:
        assert np.array_equal(other.images, first.images)
        assert np.array_equal(other.labels, first.labels)
    assert [path.name for path in tmp_path.iterdir()] == ["MNIST"]  # nothing is left of downloads
