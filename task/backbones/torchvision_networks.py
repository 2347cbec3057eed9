"""Torchvision's networks as frozen ones, with weights from a file (``backbone.weights``)."""

from torch import nn

from flwr_distill.task.backbones.frozen import Frozen, side_for
from flwr_distill.task.datasets.types import DataSpec
from flwr_distill.task.errors import ModelError
from flwr_distill.task.models.last_layer import last_dense, last_dense_layer
from flwr_distill.task.models.registry import ModelFactory, register_family


@register_family("torchvision")
def factory_of(name: str) -> ModelFactory:
    """Factory of a classifier of torchvision's without its last layer, and a linear head.

    Its images have the mean, deviation and size of its published weights, or 128 pixels a side
    where the run's are small. Without a file its weights are random.
    """
    import torchvision.models
    from torchvision.models import get_model, get_model_weights, list_models  # slow

    if name not in list_models(torchvision.models):
        raise ModelError(
            "torchvision has no such classifier",
            where="model",
            value=f"torchvision:{name}",
            remedy="use resnet18, mobilenet_v2 or efficientnet_b0",
        )

    def build(spec: DataSpec) -> nn.Module:
        network = get_model(name, weights=None)
        seen = get_model_weights(name).DEFAULT.transforms()
        width = last_dense_layer(network).in_features
        network.set_submodule(last_dense(network), nn.Identity())
        size = side_for(spec, seen.crop_size[0])
        return Frozen(network, width, spec, size=size, mean=tuple(seen.mean), std=tuple(seen.std))

    return build
