"""Models by name."""

from flwr_distill.task.backbones import efficientnet, random_features
from flwr_distill.task.last_layer import last_dense, last_dense_layer
from flwr_distill.task.models import papers, papers_fedhead, shufflenet, torchvision_models
from flwr_distill.task.models.checks import why_not_private, why_private_step_fails
from flwr_distill.task.models.registry import (
    ModelError,
    architecture,
    create_model,
    create_own_model,
    is_code,
    model_names,
    model_of,
    register,
)

__all__ = [
    "ModelError",
    "architecture",
    "create_model",
    "create_own_model",
    "efficientnet",
    "is_code",
    "last_dense",
    "last_dense_layer",
    "model_names",
    "model_of",
    "papers",
    "papers_fedhead",
    "random_features",
    "register",
    "shufflenet",
    "torchvision_models",
    "why_not_private",
    "why_private_step_fails",
]
