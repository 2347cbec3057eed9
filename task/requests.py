"""What a strategy asks of nodes beyond training: checked on both sides, sent as a config record."""

from typing import Annotated

from pydantic import Field

from task.settings import Block


class LabelKnowledge(Block):
    """Soft labels on a global auxiliary set (HFLDD, step 1).

    Parameters
    ----------
    initial_steps : int (default: 10)
        E_1, SGD steps of the initial model before soft labels are taken.
    initial_lr : float (default: 0.01)
        Learning rate of these steps.
    initial_batch_size : int (default: 64)
        Minibatch of these steps.
    auxiliary : str (default: "noise")
        Global auxiliary set D_g, which every node builds for itself: ``noise``, ``fashion-mnist``,
        ``tiny-imagenet``, or a folder or npz that is on every node.
    auxiliary_size : int (default: 1000)
        |D_g|.
    """

    initial_steps: Annotated[int, Field(ge=1)] = 10
    initial_lr: Annotated[float, Field(gt=0)] = 0.01
    initial_batch_size: Annotated[int, Field(ge=1)] = 64
    auxiliary: Annotated[str, Field(min_length=1)] = "noise"
    auxiliary_size: Annotated[int, Field(ge=1)] = 1000


class Distillation(Block):
    """Virtual data in place of a node's own (HFLDD, step 4).

    Parameters
    ----------
    distiller : str (default: "auto")
        ``auto``, ``dm``, ``kip`` (the paper's) or ``module:function``.
    distilled_size : int (default: 40)
        |D~_i|, virtual samples of a node, spread evenly over the classes that it holds.
    distill_steps : int (default: 0)
        Steps of the distiller; 0 takes the distiller's own default.
    start : str (default: "class-stats")
        What virtual images start from: ``class-stats``, ``pixel-stats`` or ``noise``.
    share_raw_data : bool (default: False)
        The paper's "w/o DD" ablation: raw data in place of virtual data. Gives up privacy.
    """

    distiller: Annotated[str, Field(min_length=1)] = "auto"
    distilled_size: Annotated[int, Field(ge=1)] = 40
    distill_steps: Annotated[int, Field(ge=0)] = 0
    start: Annotated[str, Field(min_length=1)] = "class-stats"
    share_raw_data: bool = False
