"""Strategies by name: of a declared method, or any Flower strategy."""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from inspect import Parameter, signature
from typing import Any, get_type_hints

from flwr.serverapp.strategy import FedAvg, FedXgbBagging, FedXgbCyclic, Strategy
from pydantic import ConfigDict, TypeAdapter, ValidationError

from flwr_distill.protocol.arguments import read_arguments
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import (
    built_in_methods,
    check_strategy_name,
    find_method,
    method_of,
)
from flwr_distill.strategies.common.checked import CheckedFedAvg, RobustFedAvg
from flwr_distill.strategies.common.run import Run
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.plugin import PluginError, import_object, located
from flwr_distill.task.settings import (
    Block,
)

_OF_TREES = {strategy.__name__.lower(): strategy for strategy in (FedXgbBagging, FedXgbCyclic)}
"""Flower's strategies that combine XGBoost's trees."""
_LENIENT = ConfigDict(arbitrary_types_allowed=True)
STARTED_WITH = (
    *("grid", "initial_arrays", "num_rounds"),
    *("timeout", "train_config", "evaluate_fn"),
)
"""What our ServerApp gives to a strategy's ``start``, by name."""


def find_strategy(name: str, setting: str = "strategy") -> tuple[type[Strategy], Method | None]:
    """Find a strategy class by a method's name or ``module:Class``, and its method.

    That is None if neither it nor a base class is declared. Raises SettingsError if there is no
    such strategy, or it is not a Flower ``Strategy``, or has a loop of its own that does not take
    Flower's arguments; `setting` names it.
    """
    if name not in _OF_TREES:
        check_strategy_name(name, setting)
    method = find_method(name)
    path = method.strategy if method else name
    try:
        strategy = _OF_TREES.get(name) or import_object(path)
    except PluginError as error:
        of = f"of {method.package}, " if method and method.package else ""
        raise SettingsError(f"{of}on the server: {error}", where=setting, value=name) from error
    if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
        problem = f"{path} is not a flwr.serverapp.strategy.Strategy"
        raise SettingsError(problem, where=setting, value=name)
    if issubclass(strategy, tuple(_OF_TREES.values())):
        raise SettingsError(
            f"{strategy.__name__} combines XGBoost's trees, and nodes here train networks",
            where=setting,
            value=name,
            remedy="take another strategy, such as fedavg",
        )
    try:
        signature(strategy.start).bind(None, **dict.fromkeys(STARTED_WITH))
    except TypeError as error:
        raise SettingsError(
            f"{strategy.__name__}.start {error}",
            where=setting,
            value=name,
            remedy=f"it needs the parameters of Flower's Strategy.start: {', '.join(STARTED_WITH)}",
        ) from None
    return strategy, method or method_of(strategy)


def create_strategy(
    strategy: type[Strategy], settings: Block | None, run: Run, arguments: dict[str, Any]
) -> Strategy:
    """Make a strategy for a run.

    A class with ``from_run`` is made by that. Others get their settings by name, and a FedAvg also
    the run's sampling arguments that it takes. `arguments` take precedence.

    Raises SettingsError if the class does not take the arguments, or the aggregator.
    """
    if run.aggregator and not issubclass(strategy, RobustFedAvg):
        raise SettingsError(
            f"{strategy.__name__} combines models by its own rule",
            where="aggregator",
            value=type(run.aggregator).__name__.lower(),
            remedy='set aggregator to "", or strategy to the aggregator itself',
        )
    _check_types(strategy, arguments, "strategy-args")
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
        reason = _reason(error, strategy, arguments, settings)
        where = f"strategy = {name!r}, strategy-args"
        raise SettingsError(reason, where=where, value=arguments) from error


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
    if unknown := _unknown_argument(strategy, arguments, fields):
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

    Raises SettingsError if there is no such strategy, or it does not take the arguments.
    """
    if not name:
        return None
    strategy, _ = find_strategy(name, "aggregator")
    if not _only_combines(strategy):
        raise SettingsError(
            f"{strategy.__name__} does more than combine the models of a round",
            where="aggregator",
            value=name,
            remedy="take agreement, krum, multikrum, bulyan, fedmedian or fedtrimmedavg",
        )
    options = read_arguments(arguments, "aggregator-args")
    _check_types(strategy, options, "aggregator-args")
    try:
        return strategy(**options)
    except Exception as error:  # whatever another package's code does
        where = f"aggregator = {name!r}, aggregator-args"
        reason = _reason(error, strategy, options)
        raise SettingsError(reason, where=where, value=options) from error


def _only_combines(strategy: type[Strategy]) -> bool:
    """Whether a class differs from its base class only in how it combines models."""
    if not issubclass(strategy, CheckedFedAvg):
        return strategy.configure_train is FedAvg.configure_train
    hooks = ("configure_train", "records", "read")
    return all(getattr(strategy, hook) is getattr(CheckedFedAvg, hook) for hook in hooks)


def _check_types(cls: type, arguments: Mapping[str, Any], setting: str) -> None:
    """Check that arguments are of the types that a class's constructor names for them.

    A constructor that takes ``**kwargs`` hands on to the next class of its MRO. Names that none has
    are left to the constructor itself.
    """
    hints = _hints(cls)
    for name, value in arguments.items():
        if name not in hints:
            continue
        adapter: TypeAdapter[Any] = TypeAdapter(hints[name], config=_LENIENT)
        try:
            if isinstance(value, list):  # may stand for a tuple
                adapter.validate_json(json.dumps(value), strict=True)
            else:
                adapter.validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Input ")
            raise SettingsError(reason, where=name, value=value, source=setting) from None


def _unknown_argument(cls: type, arguments: Iterable[str], settings: Iterable[str] = ()) -> str:
    """Name an argument that a class's constructor does not know, and all that it knows.

    `settings` are further names that it knows. Empty if it knows all arguments.
    """
    named = {Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY}
    known = set(settings)
    for constructor in _constructors(cls):
        _, *parameters = signature(constructor).parameters.values()  # without self
        known |= {parameter.name for parameter in parameters if parameter.kind in named}
    unknown = sorted(set(arguments) - known)
    if not unknown:
        return ""
    close = difflib.get_close_matches(unknown[0], known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"there is no argument {unknown[0]!r} ({hint}There are {', '.join(sorted(known))})"


def _hints(cls: type) -> dict[str, Any]:
    """Types of a constructor's arguments by name."""
    hints: dict[str, Any] = {}
    for constructor in _constructors(cls):
        with suppress(NameError):  # annotations that only a type checker can resolve
            hints = {**get_type_hints(constructor), **hints}
    return hints


def _constructors(cls: type) -> Iterator[Callable[..., None]]:
    """Constructors that may get an argument: while they take ``**kwargs``, the next one's."""
    for base in cls.__mro__:
        if (constructor := vars(base).get("__init__")) is None or base is object:
            continue
        yield constructor
        parameters = signature(constructor).parameters.values()
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
            break
