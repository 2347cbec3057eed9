"""Models that stay on nodes from round to round."""

from dataclasses import replace

from torch import nn

from flwr_distill.client.session import Session
from flwr_distill.client.terms import store_tensors, stored_tensors

KEPT = "own-model"
MODEL = "model"
"""Key of the node config: the node's own architecture, in place of the run's."""


def with_own_model(session: Session) -> Session:
    """The session with the architecture of the node config, if that names one."""
    name = str(session.node_config.get(MODEL, session.task.model))
    return replace(session, task=session.task.model_copy(update={"model": name}))


def own_model(session: Session) -> tuple[nn.Module, bool]:
    """The node's own model on its device, and whether it was stored before.

    A first model has the initial weights of the run's seed, so that nodes of one architecture
    start alike.
    """
    model = session.new_model()
    model.to(session.device)
    state = stored_tensors(session, KEPT, model.state_dict())
    if state is not None:
        model.load_state_dict(state)
    return model, state is not None


def keep_own_model(session: Session, model: nn.Module) -> None:
    """Store the node's own model; `session` is that of the round."""
    store_tensors(session, KEPT, model.state_dict())
