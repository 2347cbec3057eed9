"""Hooks of other packages, by the names in the setting ``hooks``.

A package registers its hooks by entry points in the group ``flwr_distill.hooks``.
"""

from importlib.metadata import entry_points

from flwr_distill.base.text import listed
from flwr_distill.server.hooks import Hook
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.plugin import PluginError, import_object, load_plugin, located, package_of

GROUP = "flwr_distill.hooks"


def find_hooks(names: str) -> dict[str, Hook]:
    """Make the hooks that a run names.

    Parameters
    ----------
    names : str
        Names of entry points, or ``module:object``, separated by commas. Each leads to a `Hook`, or
        to what makes one without arguments, such as its class.

    Returns
    -------
    dict[str, Hook]
        By name, in the same order.

    Raises
    ------
    SettingsError
        If a name is unknown or given twice, or what it leads to fails or is no hook.
    """
    hooks: dict[str, Hook] = {}
    for name in filter(None, map(str.strip, names.split(","))):
        if name in hooks:
            raise SettingsError(f"hooks = {names!r}: {name} is named twice (name it once)")
        try:
            hooks[name] = _made(_loaded(name))
        except PluginError as error:
            raise SettingsError(f"hooks = {names!r}: {name}: {error}") from error
    return hooks


def _loaded(name: str) -> object:
    """What a name leads to."""
    if ":" in name:
        return import_object(name)
    points = entry_points(group=GROUP)
    found = [point for point in points if point.name == name]
    if not found:
        known = ", ".join(sorted(points.names)) or "none is installed"
        raise PluginError(
            f"no installed hook has this name: {known} (install its package, or name it as "
            "module:object)"
        )
    if len(found) > 1:
        packages = listed(sorted(map(package_of, found)))
        raise PluginError(f"{packages} bring it (uninstall all but one, or use module:object)")
    return load_plugin(found[0])


def _made(what: object) -> Hook:
    """The hook itself, or the one that a class or function makes."""
    if callable(what) and not isinstance(what, Hook):
        try:
            what = what()
        except Exception as error:  # whatever another package's code does
            raise PluginError(f"it cannot be made: {located(error)}") from error
    if not isinstance(what, Hook):
        raise PluginError(f"it is a {type(what).__name__}, need a flwr_distill.server.hooks.Hook")
    return what
