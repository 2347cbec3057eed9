"""Plug-ins of other packages: ``module:attribute`` names and an entry point.

A package registers one entry point in the group ``flwr_distill.methods`` that refers to a
declaration (:class:`protocol.method.Method`).
"""

import importlib
import traceback
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import cast

GROUP = "flwr_distill.methods"


class PluginError(ValueError):
    """A ``module:attribute`` name cannot be resolved, or a plug-in fails."""


def import_object(path: str) -> object:
    """Import ``package.module:attribute``, unchecked; raise PluginError if that fails."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise PluginError(f"{path!r} is not of the form 'package.module:attribute'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise PluginError(
            f"module {module_name!r} cannot be imported ({error}); install its package "
            "or put its folder on PYTHONPATH"
        ) from error
    except Exception as error:  # whatever another package's code does
        raise PluginError(
            f"module {module_name!r} cannot be imported: {_located(error)}"
        ) from error
    try:
        return cast(object, getattr(module, attribute))
    except AttributeError:
        raise PluginError(f"module {module_name!r} has no attribute {attribute!r}") from None


def installed_plugins() -> EntryPoints:
    """Entry points of installed packages; not loaded."""
    return entry_points(group=GROUP)


def load_plugin(point: EntryPoint) -> object:
    """Load an entry point; raise PluginError, which says where, if that fails."""
    try:
        return point.load()
    except Exception as error:  # whatever another package's code does
        raise PluginError(f"{point.value} cannot be loaded: {_located(error)}") from error


def plugged_in(kind: str, name: str) -> str | None:
    """``module:attribute`` of an installed package's model, dataset or distiller, or None."""
    for point in installed_plugins():
        try:
            table = getattr(load_plugin(point), kind, {})
        except PluginError:
            continue  # a broken plug-in must not stop others; its own users get the error
        if name in table:
            return str(table[name])
    return None


def _located(error: Exception) -> str:
    """Format an error with the file and line that raised it or has the syntax error."""
    if isinstance(error, SyntaxError):
        file, line, reason = error.filename, error.lineno, error.msg
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        file, line, reason = frame.filename, frame.lineno, str(error)
    return f"{type(error).__name__}: {reason} ({file}, line {line})"
