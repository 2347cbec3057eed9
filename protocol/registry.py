"""Methods by name: ours, and those of installed packages.

Ours are the ``METHODS`` of the `method` module in each folder of `strategies`. An installed package
declares its own by an entry point in the group ``flwr_distill.methods``.
"""

import difflib
import importlib
import pkgutil
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from logging import WARNING

from flwr.app import ConfigRecord, Message
from flwr.common import log

from flwr_distill.protocol.meeting import PHASES as MEETING
from flwr_distill.protocol.messages import CONFIG
from flwr_distill.protocol.method import EVALUATE_PHASE, TRAIN_PHASE, Method, Phase
from flwr_distill.protocol.secure_sums import PHASES as SECURE_SUMS
from flwr_distill.protocol.secure_sums import in_secure_sums
from flwr_distill.protocol.statistics import PHASES as STATISTICS
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.plugin import (
    PluginError,
    installed_plugins,
    load_plugin,
    package_of,
    plugged_in_readers,
)
from flwr_distill.task.settings import (
    Block,
)

STRATEGIES = "flwr_distill.strategies"
COMMON = (*MEETING, *STATISTICS, *SECURE_SUMS)
"""Phases of no single method."""


@cache
def built_in_methods() -> dict[str, Method]:
    """Methods of this project, by name."""
    strategies = importlib.import_module(STRATEGIES)
    modules = (
        importlib.import_module(f"{STRATEGIES}.{folder.name}.method")
        for folder in pkgutil.iter_modules(strategies.__path__)
        if folder.name != "common"
    )
    return {method.name: method for module in modules for method in module.METHODS}


@cache
def all_methods() -> dict[str, Method]:
    """All methods by name; an unusable plug-in is excluded with a warning."""
    methods = dict(built_in_methods())
    for name in sorted(installed_plugins().names):
        try:
            methods[name] = _installed_method(name)
        except SettingsError as error:
            log(WARNING, "%s", error)
    return methods


def find_method(name: str) -> Method | None:
    """Find a method by name; None if there is none, SettingsError if it is an unusable plug-in."""
    if name in installed_plugins().names:
        return _installed_method(name)
    return built_in_methods().get(name)


def check_strategy_name(name: str, setting: str = "strategy") -> None:
    """Check that there is a strategy of a name, as far as that is known without importing it.

    A name is a method's, or ``module:Class``, which may be any. Raises SettingsError with those
    that there are; `setting` names it.
    """
    method = find_method(name)
    if ":" in (method.strategy if method else name):
        return
    known = sorted(name for name, m in all_methods().items() if m.strategy)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {close[0]}?" if close else ""
    problem = f"not one of {', '.join(known)}, nor module:Class{hint}"
    raise SettingsError(problem, where=setting, value=name)


def method_of(strategy: type) -> Method | None:
    """Find the method of a strategy class, or of its nearest base class."""
    # reversed: if a plug-in declares a class of ours or Flower's, our declaration wins
    by_class = {method.strategy: method for method in reversed(all_methods().values())}
    names = (f"{base.__module__}:{base.__qualname__}" for base in strategy.__mro__)
    return next((by_class[name] for name in names if name in by_class), None)


def handlers() -> dict[str, str]:
    """Handlers on nodes, as ``module:function``, by message type."""
    phases = [*COMMON, *(phase for method in all_methods().values() for phase in method.phases)]
    return {phase.message_type: phase.handler for phase in phases if phase.handler}


def phase_titles() -> dict[str, str]:
    """Titles of all phases, by message type."""
    phases = [p for method in all_methods().values() for p in method.phases]
    phases += [*COMMON, TRAIN_PHASE, EVALUATE_PHASE]
    return {phase.message_type: phase.title for phase in phases}


def phases_of(
    method: Method | None, start: Method | None = None, *, secure_sums: bool = False
) -> dict[str, Phase]:
    """Phases of a run by message type: the method's, its start's, and those that all runs have.

    With `secure_sums`, answers that are summed are masked, in further phases. Phases that would
    send a single node's model without masks are not among them.
    """
    own = [phase for each in (start, method) if each for phase in each.phases]
    common = (*MEETING, *STATISTICS, TRAIN_PHASE, EVALUATE_PHASE)
    phases = {p.message_type: p for p in (*common, *own)}
    if secure_sums:
        phases |= {name: in_secure_sums(phases[name]) for name in summed_in(method)}
        phases = {name: phase for name, phase in phases.items() if not phase.shows_single}
        phases |= {phase.message_type: phase for phase in SECURE_SUMS}
    return phases


def summed_in(method: Method | None) -> tuple[str, ...]:
    """Message types whose answers are masked in a run with ``secure-sums``."""
    of_all = (phase.message_type for phase in MEETING if phase.summed)
    return (*of_all, *(method.summed if method else ()))


def buffered_in(method: Method) -> tuple[str, ...]:
    """Message types whose replies are models, of which a method needs only the mean by samples."""
    phases = phases_of(method)
    return tuple(
        name
        for name in method.summed
        if phases[name].averaged == "own" and phases[name].summed is None
    )


def check_config(message: Message) -> None:
    """Check that nodes read every key in the config of a plain train or evaluate message.

    The values are the node's to check, and so are messages of other types.

    Raises SettingsError if a key is not one of a phase of this type, such as ``train.*``, or a
    method's own: it would change nothing.
    """
    message_type = message.metadata.message_type
    plain = (TRAIN_PHASE, EVALUATE_PHASE)
    if message_type not in {phase.message_type for phase in plain}:
        return
    phases = [*plain, *(phase for method in all_methods().values() for phase in method.phases)]
    configs = [
        phase.request.configs[CONFIG]
        for phase in phases
        if phase.message_type == message_type and phase.request and CONFIG in phase.request.configs
    ]
    known = {
        field.alias or name for config in configs for name, field in config.model_fields.items()
    }
    if unknown := message.content.config_records.get(CONFIG, ConfigRecord()).keys() - known:
        key = min(unknown)
        raise SettingsError(
            "the strategy sends it, and nodes do not read it",
            where=f"config of {message_type} messages, {key[:60]!r}",
            remedy=f"remove it, or use one of {', '.join(sorted(known))}",
        )


def plugin_paths() -> list[str]:
    """``module:attribute`` of the code that installed packages bring for nodes."""
    paths = plugged_in_readers()
    for method in all_methods().values():
        if method.package:
            paths += [phase.handler for phase in method.phases]
            for table in (method.terms, method.models, method.datasets, method.distillers):
                paths += table.values()
    return paths


def _installed_method(name: str) -> Method:
    """Method of an installed package that nothing else gets in the way of."""
    method = _declared(name)
    for other in installed_plugins().names - {name}:
        try:
            neighbour = _declared(other)
        except SettingsError:
            continue  # it cannot be used, and cannot be in the way
        if shared := _shared(_code(method), _code(neighbour)):
            raise SettingsError(
                f"{shared!r} is also of method {other!r} of {neighbour.package}, with other code",
                where=f"method {name!r} of {method.package}",
                remedy="rename it, or uninstall one of them",
            )
    return method


def _declared(name: str) -> Method:
    points = list(installed_plugins().select(name=name))
    packages = [package_of(point) for point in points]

    def wrong(problem: str, remedy: str = "") -> SettingsError:
        where = f"method {name!r} of {' and '.join(packages)}"
        return SettingsError(problem, where=where, remedy=remedy)

    if len(points) > 1:
        raise wrong("only one can have the name", "uninstall the others")
    if name in built_in_methods():
        raise wrong("the name is taken by a method of flwr-distill", "rename it")
    point = points[0]
    try:
        plugin = load_plugin(point)
    except PluginError as error:
        raise wrong(str(error)) from error
    if isinstance(plugin, type):  # a strategy that needs nothing else
        plugin = Method(name, f"{plugin.__module__}:{plugin.__qualname__}")
    if not isinstance(plugin, Method):
        needed = "need a protocol.method.Method or a strategy class"
        raise wrong(f"{point.value} is a {type(plugin).__name__}, {needed}")
    if plugin.name != name:
        raise wrong(f"it declares itself as {plugin.name!r}", "name both alike")
    missing = [k for k, f in (plugin.settings or Block).model_fields.items() if f.is_required()]
    if missing:
        raise wrong(f"its setting {missing[0]!r} has no default", "give it one")
    if taken := _shared(_code(plugin), _code_of_ours()) or _name_of_ours(plugin):
        raise wrong(f"{taken!r} is taken by flwr-distill", "rename it")
    return replace(plugin, package=packages[0])


def _code(method: Method) -> dict[str, str]:
    """Code on nodes by what asks for it: message types, and records or keys of loss terms."""
    return {p.message_type: p.handler for p in method.phases} | dict(method.terms)


def _code_of_ours() -> Mapping[str, str]:
    common = {p.message_type: p.handler for p in (*COMMON, TRAIN_PHASE, EVALUATE_PHASE)}
    return ChainMap(common, *map(_code, built_in_methods().values()))


def _shared(code: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """What asks for other code in one mapping than in the other."""
    return next((key for key, path in code.items() if other.get(key, path) != path), None)


def _name_of_ours(plugin: Method) -> str | None:
    """A model, data set or distiller of ours whose name the plug-in takes."""
    if not (plugin.models or plugin.datasets or plugin.distillers):
        return None
    from flwr_distill.distill import distiller_names  # here: these import torch
    from flwr_distill.task.datasets.registry import dataset_names
    from flwr_distill.task.models import model_names

    ours = (
        (plugin.models, model_names()),
        (plugin.datasets, dataset_names()),
        (plugin.distillers, distiller_names()),
    )
    return next((name for table, names in ours for name in table if name in names), None)
