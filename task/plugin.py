"""Plug-ins of other packages: ``module:attribute`` names and an entry point.

Entry points in the group ``flwr_distill.methods`` lead to declarations
(:class:`protocol.method.Method`), those in ``flwr_distill.readers`` to readers (`task.readers`).
"""

import importlib
import traceback
from collections.abc import Collection
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import cast

GROUP = "flwr_distill.methods"
READERS = "flwr_distill.readers"


class PluginError(ValueError):
    """A ``module:attribute`` name cannot be resolved, or a plug-in fails."""


def import_object(path: str) -> object:
    """Import ``package.module:attribute``, unchecked; raise PluginError if that fails."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise PluginError(f"{path!r} is not of the form 'package.module:attribute'")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever another package's code does
        if isinstance(error, ModuleNotFoundError) and _holds(module_name, error.name):
            raise PluginError(
                f"module {module_name!r} cannot be imported ({error}); install its package "
                "or put its folder on PYTHONPATH"
            ) from error
        raise PluginError(
            f"module {module_name!r} cannot be imported: {located(error, path)}"
        ) from error
    try:
        return cast(object, getattr(module, attribute))
    except AttributeError:
        place = getattr(module, "__file__", None)  # another than meant, where a name is taken
        raise PluginError(
            f"module {module_name!r} ({place}) has no attribute {attribute!r}"
        ) from None


def path_of(function: object) -> str:
    """``module:attribute`` of a function or class, for errors; it may be a local one."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', type(function).__module__)}:{name}"


def installed_plugins() -> EntryPoints:
    """Entry points of installed packages; not loaded."""
    return entry_points(group=GROUP)


def load_plugin(point: EntryPoint) -> object:
    """Load an entry point; raise PluginError, which says where, if that fails."""
    try:
        return point.load()
    except Exception as error:  # whatever another package's code does
        raise PluginError(
            f"{point.value} cannot be loaded: {located(error, point.value)}"
        ) from error


def package_of(point: EntryPoint) -> str:
    """Distribution that an entry point comes with, ``name==version``."""
    return f"{point.dist.name}=={point.dist.version}" if point.dist else "an installed package"


def plugged_in(kind: str, name: str) -> str | None:
    """``module:attribute`` of an installed package's model, dataset or distiller, or None.

    Parameters
    ----------
    kind : str
        ``models``, ``datasets`` or ``distillers``.
    name : str
        As the package names it.

    Raises
    ------
    PluginError
        If several packages bring it.
    """
    paths = {}
    for point in installed_plugins():
        try:
            table = getattr(load_plugin(point), kind, {})
        except PluginError:
            continue  # a broken plug-in must not stop others; its own users get the error
        if name in table:
            paths[package_of(point)] = str(table[name])
    if len(set(paths.values())) > 1:
        raise PluginError(
            f"{kind.removesuffix('s')}={name!r} comes with {' and '.join(sorted(paths))}: only one "
            "can have the name (uninstall the others, or name it as 'package.module:attribute')"
        )
    return next(iter(paths.values()), None)


def plugged_in_readers() -> list[str]:
    """``module:attribute`` of the readers that installed packages bring, not imported."""
    return [point.value for point in entry_points(group=READERS)]


def located(error: Exception, *paths: str) -> str:
    """Format an error in a line, with the file and line where it comes from.

    That is where the syntax error is, or the innermost frame of the packages of `paths`
    (``module:attribute``), or else of all.
    """
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    file, line = (_frames(error, paths) or _frames(error))[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({file}, line {line})"


def raised_in(error: Exception, paths: Collection[str]) -> bool:
    """Whether an error passed through the packages of `paths` (``module:attribute``)."""
    return bool(_frames(error, paths))


def _frames(error: Exception, paths: Collection[str] | None = None) -> list[tuple[str, int]]:
    """File and line of an error's frames, outermost first; None means those of all packages."""
    packages = None if paths is None else {_package(path) for path in paths}
    return [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if packages is None or _package(frame.f_globals.get("__name__", "")) in packages
    ]


def _package(path: str) -> str:
    """Top-level package of ``package.module:attribute``."""
    return path.partition(":")[0].partition(".")[0]


def _holds(module: str, missing: str | None) -> bool:
    """Whether a missing module is this one or a package that it is in."""
    return missing is not None and f"{module}.".startswith(f"{missing}.")
