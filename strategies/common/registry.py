"""Strategies by name: of a declared method, or any Flower strategy."""

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from flwr.serverapp.strategy import FedAvg, FedXgbBagging, FedXgbCyclic, Strategy

from flwr_distill.protocol.arguments import read_arguments
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import (
    built_in_methods,
    check_strategy_name,
    find_method,
    method_of,
)
from flwr_distill.strategies.common.arguments import check_types, unknown_argument
from flwr_distill.strategies.common.checked import CheckedFedAvg, RobustFedAvg
from flwr_distill.strategies.common.run import Run
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.plugin import PluginError, import_object, located
from flwr_distill.task.settings import (
    Block,
)

_OF_TREES = {strategy.__name__.lower(): strategy for strategy in (FedXgbBagging, FedXgbCyclic)}
"""Flower's strategies that combine XGBoost's trees."""
STARTED_WITH = (
    *("grid", "initial_arrays", "num_rounds"),
    *("timeout", "train_config", "evaluate_fn"),
)
"""What our ServerApp gives to a strategy's ``start``, by name."""


def find_strategy(name: str, setting: str = "strategy") -> tuple[type[Strategy], Method | None]:
    """Find a strategy class, and the method that declares it or its nearest base class.

    Parameters
    ----------
    name : str
        Name of a method, or ``module:Class``.
    setting : str (default: "strategy")
        Setting name, used in errors.

    Raises
    ------
    SettingsError
        If there is no such strategy, or it is not a Flower ``Strategy``, or has a loop of its own
        that does not take Flower's arguments.
    """
    if name not in _OF_TREES:
        check_strategy_name(name, setting)
    method = find_method(name)
    path = method.strategy if method else name
    try:
        strategy = _OF_TREES.get(name) or import_object(path)
    except PluginError as error:
        of = f" of {method.package}" if method and method.package else ""
        raise SettingsError(f"{setting} = {name!r}{of}, on the server: {error}") from error
    if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
        raise SettingsError(
            f"{setting} = {name!r}: {path} is not a flwr.serverapp.strategy.Strategy"
        )
    if issubclass(strategy, tuple(_OF_TREES.values())):
        raise SettingsError(
            f"{setting} = {name!r}: {strategy.__name__} combines XGBoost's trees, and nodes here "
            "train networks (take another strategy, such as fedavg)"
        )
    try:
        signature(strategy.start).bind(None, **dict.fromkeys(STARTED_WITH))
    except TypeError as error:
        raise SettingsError(
            f"{setting} = {name!r}: {strategy.__name__}.start {error} (it needs the parameters of "
            f"Flower's Strategy.start: {', '.join(STARTED_WITH)})"
        ) from None
    return strategy, method or method_of(strategy)


def create_strategy(
    strategy: type[Strategy], settings: Block | None, run: Run, arguments: dict[str, Any]
) -> Strategy:
    """Make a strategy for a run.

    A class with ``from_run`` is made by that. Others get their settings by name, and a FedAvg also
    the run's sampling arguments that it takes. `arguments` take precedence.

    Raises
    ------
    SettingsError
        If the class does not take the arguments, or the aggregator.
    """
    if run.aggregator and not issubclass(strategy, RobustFedAvg):
        raise SettingsError(
            f"aggregator = {type(run.aggregator).__name__.lower()!r}: {strategy.__name__} combines "
            'models by a rule of its own (set aggregator to "", or strategy to the aggregator '
            "itself)"
        )
    check_types(strategy, arguments, "strategy-args")
    try:
        if hasattr(strategy, "from_run"):
            instance: Strategy = strategy.from_run(settings, run, **arguments)
            return instance
        own = _sampling(strategy, run) if issubclass(strategy, FedAvg) else {}
        return strategy(**{**own, **(settings.model_dump() if settings else {}), **arguments})
    except SettingsError:
        raise
    except Exception as error:  # whatever another package's code does
        name = f"{strategy.__module__}:{strategy.__qualname__}"
        raise SettingsError(
            f"strategy = {name!r}, strategy-args = {arguments}: "
            f"{_reason(error, strategy, arguments, settings)}"
        ) from error


def _reason(
    error: Exception,
    strategy: type[Strategy],
    arguments: Mapping[str, Any],
    settings: Block | None = None,
) -> str:
    """Why a constructor fails: its arguments, or its code."""
    if not isinstance(error, TypeError):
        return f"it cannot be made: {located(error, strategy.__module__)}"
    fields = type(settings).model_fields if settings else ()
    if unknown := unknown_argument(strategy, arguments, fields):
        return unknown
    if strategy.__module__.startswith("flwr."):  # ours of the same name gives it what it needs
        fitted = f"flwr_distill.strategies.flower.strategy:{strategy.__name__}"
        for method in built_in_methods().values():
            if method.strategy == fitted:
                return f"{error} (take strategy = {method.name!r})"
    return str(error)


def _sampling(strategy: type[FedAvg], run: Run) -> dict[str, Any]:
    """The run's sampling arguments that the constructor takes."""
    parameters = signature(strategy).parameters
    takes_any = any(taken.kind == Parameter.VAR_KEYWORD for taken in parameters.values())
    return {key: value for key, value in run.sampling.items() if takes_any or key in parameters}


def create_aggregator(name: str, arguments: str) -> Strategy | None:
    """Make the strategy that replaces the weighted mean; None without a name.

    Raises
    ------
    SettingsError
        If there is no such strategy, or it does not take the arguments.
    """
    if not name:
        return None
    strategy, _ = find_strategy(name, "aggregator")
    if not _only_combines(strategy):
        raise SettingsError(
            f"aggregator = {name!r}: {strategy.__name__} does more than combine the models of a "
            "round (take agreement, krum, multikrum, bulyan, fedmedian or fedtrimmedavg)"
        )
    options = read_arguments(arguments, "aggregator-args")
    check_types(strategy, options, "aggregator-args")
    try:
        return strategy(**options)
    except Exception as error:  # whatever another package's code does
        raise SettingsError(
            f"aggregator = {name!r}, aggregator-args = {options}: "
            f"{_reason(error, strategy, options)}"
        ) from error


def _only_combines(strategy: type[Strategy]) -> bool:
    """Whether a class differs from its base class only in how it combines models."""
    if not issubclass(strategy, CheckedFedAvg):
        return strategy.configure_train is FedAvg.configure_train
    hooks = ("configure_train", "records", "read")
    return all(getattr(strategy, hook) is getattr(CheckedFedAvg, hook) for hook in hooks)
