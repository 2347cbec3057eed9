"""Models by name."""

from task.backbones import efficientnet, random_features
from task.models import papers, papers_cadis, papers_fedhead, papers_fedlgd, torchvision_models
from task.models.last_layer import last_dense, last_dense_layer
from task.models.registry import ModelError, create_model, model_names, register

__all__ = [
    "ModelError",
    "create_model",
    "efficientnet",
    "last_dense",
    "last_dense_layer",
    "model_names",
    "papers",
    "papers_cadis",
    "papers_fedhead",
    "papers_fedlgd",
    "random_features",
    "register",
    "torchvision_models",
]
