"""The strategy of a run, made from its settings."""

from flwr.serverapp.strategy import Strategy

from protocol.method import Method
from server.settings import RunSettings
from server.task import Task
from strategies.common.directory import Directory
from strategies.common.registry import create_aggregator, create_strategy
from strategies.common.run import Run


def strategy_of_run(
    settings: RunSettings,
    strategy: type[Strategy],
    method: Method | None,
    task: Task,
    directory: Directory,
) -> Strategy:
    """Make the strategy of a run.

    Parameters
    ----------
    settings : RunSettings
        Of the run.
    strategy : type[Strategy]
        Its class.
    method : Method, optional
        The method that it belongs to.
    task : Task
        Data and model.
    directory : Directory
        The nodes that are met.

    Raises
    ------
    SettingsError
        If the strategy does not take what the settings say.
    """
    run = Run(
        seed=settings.seed,
        model=task.model,
        spec=task.spec,
        train=settings.train,
        data_root=settings.data_root,
        links=settings.links,
        phase_timeout=settings.phase_timeout,
        fraction_train=settings.fraction_train,
        fraction_evaluate=settings.fraction_evaluate,
        directory=directory,
        aggregator=create_aggregator(settings.aggregator, settings.aggregator_args),
    )
    arguments = settings.constructor_arguments(method)
    return create_strategy(strategy, settings.of_method(method), run, arguments)
