"""Creates a run's strategy, and the one that makes its first model."""

from flwr.serverapp.strategy import Strategy

from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import all_methods
from flwr_distill.server.settings import RunSettings
from flwr_distill.server.task import Task
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.registry import (
    create_aggregator,
    create_strategy,
    find_strategy,
)
from flwr_distill.strategies.common.run import Run
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.source import reserved_samples


def strategy_of_run(
    settings: RunSettings,
    strategy: type[Strategy],
    method: Method | None,
    task: Task,
    directory: Directory,
) -> Strategy:
    """Create a run's strategy; SettingsError if it refuses the settings.

    `method` is None for undeclared classes.
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
        down_codec=settings.down_codec,
        up_codec=settings.up_codec,
        secure_sums=settings.secure_sums,
        reserved=lambda size: reserved_samples(settings, task.spec, size).inputs,
    )
    arguments = settings.constructor_arguments(method)
    return create_strategy(strategy, settings.of_method(method), run, arguments)


def settings_of_start(settings: RunSettings) -> RunSettings:
    """Settings of the phase before the first round, in which every node takes part."""
    plain = {"strategy_args": "", "aggregator": "", "aggregator_args": ""}
    shares = {"fraction_train": 1.0, "fraction_evaluate": 0.0}
    return settings.model_copy(update={"strategy": settings.start, **plain, **shares})


def method_of_start(settings: RunSettings, method: Method | None) -> Method | None:
    """The method that makes the first model of a run of `method`; None if it is random.

    Raises SettingsError if ``start`` names no method that can, or `method` needs no first model.
    """
    if not settings.start:
        return None
    able = {name: other for name, other in all_methods().items() if other.outcome == "solved"}
    problem = remedy = ""
    if settings.start not in able:
        problem = "it makes no model that training can start from"
        remedy = f'take one of {", ".join(able)}, or ""'
    elif method and method.outcome != "trained":
        is_personal = method.outcome == "personal"
        reason = "nodes keep models of their own" if is_personal else "it needs no start"
        problem = f"with strategy = {settings.strategy!r} {reason}"
        remedy = 'set start to ""'
    if problem:
        raise SettingsError(problem, where="start", value=settings.start, remedy=remedy)
    return able[settings.start]
