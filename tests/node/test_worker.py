"""What a worker says of errors on a GPU, and what it does after them; CUDA's errors are made up."""

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict

from flwr_distill.flower.worker import Note
from tests.node.workers import notes_of_worker

LOST = "CUDA error: device-side assert triggered"


@pytest.fixture
def notes_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Note]]:
    """What a worker with an app says at the end of each of two tasks."""

    def serve(app: Callable[..., Message], **run_config: Any) -> list[Note]:
        return notes_of_worker(monkeypatch, app, "cuda:1", run_config)

    return serve


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry each time that PyTorch's cache on the GPU is emptied."""
    times: list[str] = []
    about = SimpleNamespace(name="NVIDIA A10", total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: times.append("emptied"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: about)
    return times


def wrapped(error: Exception) -> Callable[..., Message]:
    """An app that makes an error of its own of another, as ours do."""

    def app(message: Message, context: Context) -> Message:
        try:
            raise error
        except Exception:
            raise ValueError("this phase failed") from None

    return app


def test_an_app_sees_the_device_that_its_node_took(notes_of: Callable[..., list[Note]]) -> None:
    seen = []

    def app(message: Message, context: Context) -> Message:
        seen.append(context.node_config["device"])
        message.metadata.__dict__["_message_id"] = "id"
        return Message(RecordDict(), reply_to=message)

    assert notes_of(app) == [("done", 0, "")] * 2
    assert seen == ["cuda:1"] * 2


def test_a_worker_ends_after_an_error_of_cuda_whatever_was_raised_from_it(
    notes_of: Callable[..., list[Note]],
) -> None:
    ((kind, _, reason),) = notes_of(wrapped(torch.AcceleratorError(LOST)))
    assert kind == "lost"
    assert "this phase failed" in reason


def test_a_worker_ends_where_cuda_has_failed_behind_an_error_of_its_libraries(
    notes_of: Callable[..., list[Note]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize() -> None:
        raise torch.AcceleratorError(LOST)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    app = wrapped(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))
    assert [kind for kind, _, _ in notes_of(app)] == ["lost"]


def test_a_worker_goes_on_after_any_other_error(notes_of: Callable[..., list[Note]]) -> None:
    assert [kind for kind, _, _ in notes_of(wrapped(KeyError("x")))] == ["failed", "failed"]


def test_a_full_gpu_is_named_with_its_memory_and_the_batch_size_and_what_helps(
    notes_of: Callable[..., list[Note]], emptied: list[str]
) -> None:
    app = wrapped(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    (kind, _, reason), _ = notes_of(app, **{"train.batch-size": 512})
    assert kind == "failed"
    assert reason.startswith(
        "cuda:1 (NVIDIA A10, 24.0 GiB) is out of memory: lower train.batch-size=512, take a "
        "smaller model or fewer virtual images, or start fewer nodes on this GPU. "
    )
    assert len(emptied) == 2
    (_, _, reason), _ = notes_of(app)
    assert "lower the batch size" in reason


def test_what_a_failed_message_held_is_free_when_the_cache_is_emptied(
    notes_of: Callable[..., list[Note]], emptied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    references: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def app(message: Message, context: Context) -> Message:
        activations = torch.zeros(3)
        references.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def count() -> None:
        alive.append(sum(tensor() is not None for tensor in references))

    monkeypatch.setattr(torch.cuda, "empty_cache", count)
    notes_of(app)
    assert len(references) == 2
    assert alive == [0, 0]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.AcceleratorError("CUDA error: out of memory"), "lost"),
        # Of a library's handle.
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas..."), "failed"),
    ],
)
def test_memory_that_is_missing_past_pytorchs_allocator_is_named_too(
    notes_of: Callable[..., list[Note]], emptied: list[str], error: Exception, kind: str
) -> None:
    (end, _, reason), *_ = notes_of(wrapped(error))
    assert end == kind
    assert "is out of memory: lower the batch size" in reason
