"""Tensors that a loss term stores between rounds."""

from collections.abc import Mapping
from logging import WARNING

from flwr.common import log
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from flwr_distill.client.session import Session


def keep(session: Session, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Store tensors under ``name``, unless a value is not finite: then the old ones stay."""
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        log(WARNING, "The new %s holds NaN or infinity and is not kept", name)
        return
    # Clones, because safetensors refuses tensors that share memory, as tied weights do.
    clones = {key: t.detach().cpu().clone().contiguous() for key, t in tensors.items()}
    session.store.write(name, save(clones))


def kept(session: Session, name: str, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Tensors stored under ``name``, on the devices of ``like``; None if missing or unlike."""
    payload = session.store.read(name)
    if payload is None:
        return None
    try:
        tensors = load(payload)
    except SafetensorError as error:
        log(WARNING, "The node's %s cannot be read and starts from scratch: %s", name, error)
        return None
    if {key: t.shape for key, t in tensors.items()} != {key: t.shape for key, t in like.items()}:
        log(WARNING, "The node's %s is of another model and starts from scratch", name)
        return None
    return {key: tensors[key].to(tensor.device) for key, tensor in like.items()}


def zeros(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros of the same names, shapes and devices."""
    return {key: tensor.detach().new_zeros(tensor.shape) for key, tensor in like.items()}
