"""SCAFFOLD: record names and declaration."""

from protocol.method import Method, Phase, all_protected
from protocol.schema import TRAIN, part_of_the_model

CONTROL_VARIATE = "control-variate"
"""Name of the second array record: the server's c; in a reply the change of c_i."""


METHODS = (
    Method(
        name="scaffold",
        strategy="strategies.scaffold:SCAFFOLD",
        summary="Control variates correct the drift of nodes.",
        phases=(
            Phase(
                "train",
                "nodes train",
                (TRAIN.plus(arrays={CONTROL_VARIATE: part_of_the_model}),),
                quorum=True,
                compared=True,
            ),
        ),
        terms={CONTROL_VARIATE: "client.scaffold:ControlVariate"},
        unprotected=all_protected,
    ),
)
