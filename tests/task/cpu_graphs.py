"""A stand-in for CUDA graphs: what is done while recording is done again at each replay.

As with CUDA, a replay takes the same tensors from the same places, and Python code is not run
again. A step that would wait for the GPU cannot be recorded; the end of the recording then raises
another error, and leaves its stream as the current one.
"""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flwr_distill.task.compute import cuda_graph

CHANGES_STATISTICS = {torch.ops.aten.native_batch_norm.default}
"""Changes its arguments, and its schema does not say so."""


class CpuGraph:
    """For torch.cuda.CUDAGraph."""

    def __init__(self):
        self.operations = []
        self.replays = 0
        self.ended = False

    def replay(self):
        self.replays += 1
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, out in self.operations:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old is not new:
                        old.copy_(new)


class Recording(TorchDispatchMode):
    """For torch.cuda.graph."""

    def __init__(self, graph, *, stream, **_):
        super().__init__()
        self.graph = graph
        self.stream = torch.cuda.stream(stream)
        self.before = []
        self.invalid = False

    def __enter__(self):
        self.stream.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        with torch.no_grad():
            for tensor, value in reversed(self.before):  # CUDA records without doing anything
                tensor.copy_(value)
        if self.invalid:
            raise torch.AcceleratorError("operation failed due to a previous error during capture")
        self.graph.ended = True
        self.stream.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.is_mutable or func in CHANGES_STATISTICS:
            changed = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self.before += [(x, x.clone()) for x in changed]
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.invalid = True
            raise torch.AcceleratorError("operation not permitted when stream is capturing")
        if not func.is_view:
            self.graph.operations.append((func, args, kwargs or {}, out))
        return out


def new_stream(device=None):
    device = device and torch.device(device.type, device.index or 0)
    return SimpleNamespace(device=device, wait_stream=lambda other: None)


def install(monkeypatch):
    """Replace torch.cuda's graphs and streams; returns a list to which graphs are added."""
    graphs = []

    def new_graph():
        graphs.append(CpuGraph())
        return graphs[-1]

    current = [new_stream()]

    class OnStream:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.before, current[0] = current[0], self.stream

        def __exit__(self, *error):
            current[0] = self.before

    for name, stand_in in {
        "CUDAGraph": new_graph,
        "Stream": new_stream,
        "current_stream": lambda device=None: current[0],
        "graph": Recording,
        "graph_pool_handle": lambda: (0, 1),
        "stream": OnStream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    # No stand-in is kept for other tests.
    monkeypatch.setattr(cuda_graph, "_stream", lambda device, thread: new_stream(device))
    return graphs
