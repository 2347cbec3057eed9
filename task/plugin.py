"""Plug-ins of other packages: ``module:attribute`` names, and entry points in a group.

Entry points in the group ``flwr_distill.methods`` lead to declarations
(:class:`protocol.method.Method`), those in ``flwr_distill.readers`` to readers (`task.readers`).
"""

import importlib
import traceback
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import TypeVar, cast

from flwr_distill.task.errors import DatasetError, ReportedError

GROUP = "flwr_distill.methods"
READERS = "flwr_distill.readers"
T = TypeVar("T")


class PluginError(ReportedError, ValueError):
    """A ``module:attribute`` name cannot be resolved, or a plug-in fails."""


def import_object(path: str) -> object:
    """Import ``package.module:attribute``, unchecked; raise PluginError if that fails."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise PluginError(f"{path!r} is not of the form 'package.module:attribute'")
    module_text = f"module {module_name!r}"
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # any of another package's code
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            problem = f"{module_text} cannot be imported: {located(error, path)}"
            raise PluginError(problem) from error
        remedy = "install its package or put its folder on PYTHONPATH"
        raise PluginError(f"{module_text} cannot be imported ({error})", remedy=remedy) from error
    try:
        return cast(object, getattr(module, attribute))
    except AttributeError:
        file = getattr(module, "__file__", None)  # perhaps of another module with this name
        raise PluginError(f"{module_text} ({file}) has no attribute {attribute!r}") from None


def call_plugin(function: object, path: str, expected: type[T], *arguments: object) -> T:
    """Call a function of the package of `path`; PluginError if it fails or returns another type."""
    if not callable(function):
        raise PluginError(f"is a {type(function).__name__}, need a function or class")
    try:
        result = function(*arguments)
    except DatasetError:  # its own report
        raise
    except Exception as error:  # any of another package's code
        raise PluginError(f"fails with {located(error, path)}") from error
    if not isinstance(result, expected):
        raise PluginError(f"returned a {type(result).__name__}, need a {expected.__name__}")
    return result


def path_of(function: object) -> str:
    """``module:attribute`` of a function or class, for errors; it may be a local one."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', type(function).__module__)}:{name}"


@cache
def installed_plugins() -> EntryPoints:
    """Entry points of packages that were installed at the first call; not loaded."""
    return entry_points(group=GROUP)


def load_plugin(point: EntryPoint) -> object:
    """Load an entry point; raise PluginError if that fails."""
    try:
        return point.load()
    except Exception as error:  # any of another package's code
        problem = f"cannot be loaded: {located(error, point.value)}"
        raise PluginError(problem, where=point.value) from error


def package_of(point: EntryPoint) -> str:
    """Distribution that an entry point comes with, ``name==version``."""
    return f"{point.dist.name}=={point.dist.version}" if point.dist else "an installed package"


def plugged_in(kind: str, name: str) -> str | None:
    """``module:attribute`` of an installed package's model, dataset or distiller, or None.

    `kind` is ``models``, ``datasets`` or ``distillers``. Raises PluginError if several packages
    have the name.
    """
    paths = {
        package_of(point): str(getattr(method, kind, {})[name])
        for point, method in _loadable()
        if name in getattr(method, kind, {})
    }
    if len(set(paths.values())) > 1:
        raise PluginError(
            f"comes with {' and '.join(sorted(paths))}: only one can have the name",
            where=kind.removesuffix("s"),
            value=name,
            remedy="uninstall the others, or name it as 'package.module:attribute'",
        )
    return next(iter(paths.values()), None)


def plugged_in_readers() -> list[str]:
    """``module:attribute`` of the readers of installed packages; see `task.readers`."""
    return [point.value for point in entry_points(group=READERS)]


def _loadable() -> Iterator[tuple[EntryPoint, object]]:
    """Entry points with their declarations; a broken one must not stop others."""
    for point in installed_plugins():
        with suppress(PluginError):
            yield point, load_plugin(point)


def located(error: Exception, *paths: str) -> str:
    """Format an error in a line, with file and line of its syntax error or innermost frame.

    Frames of the packages of `paths` (``module:attribute``) come before others.
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
