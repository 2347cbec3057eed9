"""Hooks that a run names in ``hooks``: trackers, and entry points of ``flwr_distill.hooks``."""

import difflib
from importlib.metadata import entry_points

from flwr_distill.base.text import listed
from flwr_distill.server.hooks import Hook
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.plugin import PluginError, import_object, load_plugin, located, package_of

GROUP = "flwr_distill.hooks"
TRACKERS = {
    "mlflow": "flwr_distill.server.trackers.mlflow:Mlflow",
    "wandb": "flwr_distill.server.trackers.wandb:Wandb",
}


def find_hooks(names: str) -> dict[str, Hook]:
    """Make the hooks that a run names, by name, in the same order.

    `names` are trackers, entry points, or ``module:object``, separated by commas. Each leads to a
    `Hook`, or to a callable that makes one without arguments, such as its class. Raises
    SettingsError if a name is unknown or given twice, or its object fails, is no hook, or has a
    method ``on_*`` of no event.
    """

    def error_of(problem: str, remedy: str = "") -> SettingsError:
        return SettingsError(problem, where="hooks", value=names, remedy=remedy)

    hooks: dict[str, Hook] = {}
    for name in filter(None, map(str.strip, names.split(","))):
        if name in hooks:
            raise error_of(f"{name} is named twice", "name it once")
        try:
            hooks[name] = _hook_of(_loaded(name))
        except PluginError as error:
            raise error_of(f"{name}: {error}") from error
    return hooks


def _loaded(name: str) -> object:
    if ":" in (path := TRACKERS.get(name, name)):
        return import_object(path)
    points = entry_points(group=GROUP)
    matches = [point for point in points if point.name == name]
    if not matches:
        known = ", ".join(sorted({*points.names, *TRACKERS}))
        raise PluginError(
            f"no installed hook has this name: {known} (install its package, or name it as "
            "module:object)"
        )
    if len(matches) > 1:
        packages = listed(sorted(map(package_of, matches)))
        raise PluginError(f"{packages} bring it (uninstall all but one, or use module:object)")
    return load_plugin(matches[0])


def _hook_of(what: object) -> Hook:
    """The hook itself, or the one that a class or function makes."""
    if callable(what) and not isinstance(what, Hook):
        try:
            what = what()
        except Exception as error:  # whatever another package's code does
            raise PluginError(f"it cannot be made: {located(error)}") from error
    if not isinstance(what, Hook):
        raise PluginError(f"it is a {type(what).__name__}, need a flwr_distill.server.hooks.Hook")
    if never_called := {name for name in dir(what) if name.startswith("on_")} - {*dir(Hook)}:
        name, known = min(never_called), [name for name in dir(Hook) if name.startswith("on_")]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise PluginError(f"no event calls its {name} ({hint}there are {', '.join(known)})")
    return what
