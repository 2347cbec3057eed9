"""Creates the strategy of a run."""

from flwr.serverapp.strategy import Strategy

from protocol.method import Method
from server.settings import RunSettings
from server.task import Task
from strategies.common.directory import Directory
from strategies.common.registry import create_aggregator, create_strategy, find_strategy
from strategies.common.run import Run


def strategy_of_run(
    settings: RunSettings,
    strategy: type[Strategy],
    method: Method | None,
    task: Task,
    directory: Directory,
) -> Strategy:
    """Create a run's strategy; `method` is None for undeclared classes.

    Raises
    ------
    SettingsError
        If the strategy does not accept the settings.
    """

    def create(name: str) -> Strategy:
        other = settings.model_copy(update={"strategy": name})
        return strategy_of_run(other, *find_strategy(name), task, directory)

    run = Run(
        seed=settings.seed,
        model=task.model,
        spec=task.spec,
        device=task.device,
        train=settings.train,
        data_root=settings.data_root,
        links=settings.links,
        phase_timeout=settings.phase_timeout,
        fraction_train=settings.fraction_train,
        fraction_evaluate=settings.fraction_evaluate,
        directory=directory,
        create=create,
        norm_threshold=settings.norm_threshold,
        aggregator=create_aggregator(settings.aggregator, settings.aggregator_args),
        num_rounds=settings.num_rounds,
    )
    arguments = settings.constructor_arguments(method)
    return create_strategy(strategy, settings.of_method(method), run, arguments)
