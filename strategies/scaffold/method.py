"""SCAFFOLD: record names and declaration."""

from dataclasses import replace

from flwr_distill.protocol.method import TRAIN_PHASE, Method, all_protected
from flwr_distill.protocol.schema import TRAIN, TRAIN_REQUEST, part_of_the_model

CONTROL_VARIATE = "control-variate"
"""Name of the second array record: the server's c; in a reply the change of c_i."""


METHODS = (
    Method(
        name="scaffold",
        strategy="flwr_distill.strategies.scaffold.strategy:SCAFFOLD",
        summary="Control variates correct the drift of nodes.",
        phases=(
            replace(
                TRAIN_PHASE,
                replies=(TRAIN.plus(arrays={CONTROL_VARIATE: part_of_the_model}),),
                request=TRAIN_REQUEST.plus(arrays=(CONTROL_VARIATE,)),
                leaves="the model, trained on its samples, and the change of its control variate",
            ),
        ),
        coded=(CONTROL_VARIATE,),
        terms={CONTROL_VARIATE: "flwr_distill.strategies.scaffold.client:ControlVariate"},
        unprotected=all_protected,
    ),
)
