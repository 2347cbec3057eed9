"""MOON: settings, which are also its request to nodes, and declaration."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from flwr_distill.protocol.method import TRAIN_PHASE, Method, all_protected
from flwr_distill.protocol.schema import TRAIN_REQUEST
from flwr_distill.task.settings import Block

MODEL_CONTRAST = "model-contrast"
"""Name of the record that asks for MOON's contrastive loss."""


class MOONSettings(Block):
    """Settings of MOON (``moon.*``)."""

    mu: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the contrastive loss."""
    temperature: Annotated[float, Field(gt=0)] = 0.5
    """tau, temperature of the contrastive loss."""


METHODS = (
    Method(
        name="moon",
        strategy="flwr_distill.strategies.moon.strategy:MOON",
        summary="Nodes keep their features near the global model's.",
        settings=MOONSettings,
        phases=(replace(TRAIN_PHASE, request=TRAIN_REQUEST.plus({MODEL_CONTRAST: MOONSettings})),),
        terms={MODEL_CONTRAST: "flwr_distill.strategies.moon.client:ModelContrastive"},
        unprotected=all_protected,
        defaults={"defence": {"aggregator": "agreement"}},
    ),
)
