"""Strategies by name: of a declared method, or any Flower strategy."""

import json
from inspect import Parameter, signature
from typing import Any

from flwr.serverapp.strategy import FedAvg, Strategy

from protocol.method import Method
from protocol.registry import all_methods, find_method, method_of
from strategies.common.checked import RobustFedAvg
from strategies.common.run import Run
from task.plugin import PluginError, import_object
from task.settings import Block, SettingsError


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
        If there is no such strategy, or it is not a Flower ``Strategy``.
    """
    method = find_method(name)
    path = method.strategy if method else name
    if ":" not in path:
        known = ", ".join(sorted(name for name, m in all_methods().items() if m.strategy))
        raise SettingsError(f"{setting} = {name!r}: not one of {known}, nor module:Class")
    try:
        strategy = import_object(path)
    except PluginError as error:
        of = f" of {method.package}" if method and method.package else ""
        raise SettingsError(f"{setting} = {name!r}{of}, on the server: {error}") from error
    if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
        raise SettingsError(
            f"{setting} = {name!r}: {path} is not a flwr.serverapp.strategy.Strategy"
        )
    return strategy, method or method_of(strategy)


def read_arguments(text: str, setting: str) -> dict[str, Any]:
    """Read the JSON object of a setting such as ``strategy-args``; {} if it is empty.

    Raises
    ------
    SettingsError
        If it is not a JSON object.
    """
    try:
        arguments = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise SettingsError(f"{setting} = {text!r}: not JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise SettingsError(f'{setting} = {text!r}: must be a JSON object, {{"key": 1}}')
    return arguments


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
    try:
        if hasattr(strategy, "from_run"):
            instance: Strategy = strategy.from_run(settings, run, **arguments)
            return instance
        own = _sampling(strategy, run) if issubclass(strategy, FedAvg) else {}
        return strategy(**{**own, **(settings.model_dump() if settings else {}), **arguments})
    except TypeError as error:
        raise SettingsError(f"strategy-args = {arguments}: {error}") from error


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
    options = read_arguments(arguments, "aggregator-args")
    try:
        return strategy(**options)
    except TypeError as error:
        raise SettingsError(
            f"aggregator = {name!r}, aggregator-args = {options}: {error}"
        ) from error
