"""A recording that fails on a real GPU. Last of this folder: the process may not get over it."""

import pytest
import torch

from flwr_distill.task.compute.cuda_graph import graphed
from tests.gpu.work import REAL_GPU

GPU = torch.device(REAL_GPU)


def reserved():
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(GPU)


@pytest.mark.gpu
def test_a_step_that_waits_cannot_be_recorded_and_leaves_cuda_as_it_was():
    """As with a user's network that reads a number; another one may draw random numbers."""
    recorded = graphed(lambda x: x * float(x.sum()), GPU)
    stream, before = torch.cuda.current_stream(GPU), reserved()
    for number in range(4):
        x = torch.full((2,), float(number), device=GPU)
        assert torch.equal(recorded(x), x * 2 * number)
    assert torch.cuda.current_stream(GPU) == stream
    assert torch.rand(3, device=GPU).isfinite().all()
    assert torch.nn.functional.dropout(torch.ones(9, device=GPU), 0.5).isfinite().all()
    freed = torch.empty(2**30, dtype=torch.uint8, device=GPU)
    del freed
    assert reserved() < before + 2**29
    after = graphed(lambda x: x + 1, GPU)
    for number in range(4):
        assert after(torch.full((2,), float(number), device=GPU)).tolist() == [number + 1] * 2
    assert after._can_record
