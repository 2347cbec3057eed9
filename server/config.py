"""Settings of a run: every run-config key, with its type, bounds and default."""

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from task.settings import Block, TaskSettings


class HFLDDSettings(Block):
    """Settings of HFLDD (``hfldd.*``); see :class:`strategies.hfldd.HFLDD` for their meaning.

    Parameters
    ----------
    groups : int (default: 0)
        K, the homogeneous groups; 0 takes the K with the best silhouette.
    initial_steps : int (default: 10)
        E_1, SGD steps of the initial model before soft labels are taken.
    initial_lr : float (default: 0.01)
        Learning rate of these steps.
    initial_batch_size : int (default: 64)
        Minibatch of these steps.
    auxiliary : str (default: "noise")
        Global auxiliary set D_g: ``noise``, ``fashion-mnist``, ``tiny-imagenet``, a folder or npz.
    auxiliary_size : int (default: 1000)
        |D_g|.
    distiller : str (default: "auto")
        ``auto``, ``dm``, ``kip`` (the paper's) or ``module:function``.
    distilled_size : int (default: 20)
        |D~_i|, virtual samples that a member sends.
    distill_steps : int (default: 0)
        Steps of the distiller; 0 takes the distiller's own default.
    start : str (default: "class-stats")
        What virtual images start from: ``class-stats``, ``pixel-stats`` or ``noise``.
    balanced : bool (default: True)
        Whether heads draw classes evenly from D_h.
    share_raw_data : bool (default: False)
        The paper's "w/o DD" ablation: members send raw data. Gives up privacy.
    """

    groups: Annotated[int, Field(ge=0)] = 0
    initial_steps: Annotated[int, Field(ge=1)] = 10
    initial_lr: Annotated[float, Field(gt=0)] = 0.01
    initial_batch_size: Annotated[int, Field(ge=1)] = 64
    auxiliary: Annotated[str, Field(min_length=1)] = "noise"
    auxiliary_size: Annotated[int, Field(ge=1)] = 1000
    distiller: Annotated[str, Field(min_length=1)] = "auto"
    distilled_size: Annotated[int, Field(ge=1)] = 20
    distill_steps: Annotated[int, Field(ge=0)] = 0
    start: Annotated[str, Field(min_length=1)] = "class-stats"
    balanced: bool = True
    share_raw_data: bool = False

    def strategy_arguments(self) -> dict[str, Any]:
        """Keyword arguments of :class:`strategies.hfldd.HFLDD`; 0 stands for "not set"."""
        arguments = self.model_dump()
        for key in ("groups", "distill_steps"):
            arguments[key] = arguments[key] or None
        return arguments


class RunSettings(TaskSettings):
    """All settings of a run.

    Parameters
    ----------
    strategy : str (default: "hfldd")
        A registered name, an entry point of ``flwr_distill.strategies`` or ``module:Class``.
    strategy_args : str (default: "")
        JSON object of further constructor arguments of the strategy, ``{"proximal_mu": 0.1}``.
    num_rounds : int (default: 10)
        T.
    min_nodes : int (default: 2)
        Nodes to wait for before the run begins.
    fraction_train : float (default: 1.0)
        Share of the nodes that train each round, for strategies that sample.
    fraction_evaluate : float (default: 0.0)
        Share of the nodes that evaluate each round on what they hold out (``train.holdout``).
    phase_timeout : float (default: 600.0)
        Seconds after which a phase goes on without the nodes that have not replied.
    runs_dir : str (default: "runs")
        Folder for results, relative to the ServerApp's working directory.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    strategy: Annotated[str, Field(min_length=1)] = "hfldd"
    strategy_args: str = ""
    num_rounds: Annotated[int, Field(ge=1)] = 10
    min_nodes: Annotated[int, Field(ge=1)] = 2
    fraction_train: Annotated[float, Field(gt=0, le=1)] = 1.0
    fraction_evaluate: Annotated[float, Field(ge=0, le=1)] = 0.0
    phase_timeout: Annotated[float, Field(gt=0)] = 600.0
    runs_dir: Annotated[str, Field(min_length=1)] = "runs"
    hfldd: HFLDDSettings = HFLDDSettings()
