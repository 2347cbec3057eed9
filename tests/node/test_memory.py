"""A worker keeps the memory of freed tensors while it trains, and gives it back after that."""

import ctypes
import subprocess
import sys

import pytest

CODE = """
import resource, sys
import psutil, torch
from flwr_distill.node.kernel import keep_freed, trim_heap

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return psutil.Process().memory_info().rss

if sys.argv[1] == "kept":
    keep_freed()
for _ in range(2):  # the first time, memory is new in any case
    before, most = faults(), 0
    for _ in range(10):
        blocks = [torch.ones(10_000_000) for _ in range(2)]  # 40 MB each
        blocks.clear()
print(faults() - before)
before = resident()
trim_heap()
print((before - resident()) // 1_000_000)
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc: nothing to keep"
)
def test_freed_memory_is_used_again_and_given_back_when_asked() -> None:
    (new, _), (kept, given) = (
        map(int, subprocess.check_output([sys.executable, "-c", CODE, how], text=True).split())
        for how in ("not kept", "kept")
    )
    assert new > 100_000
    assert kept < 1_000
    assert given > 50
