"""How other packages plug in: objects named as ``module:attribute``, and an entry point.

A package registers what it brings by one entry point in the group ``flwr_distill.methods``, which
leads to a declaration (:class:`protocol.method.Method`).
"""

import importlib
import traceback
from importlib.metadata import EntryPoint, EntryPoints, entry_points

GROUP = "flwr_distill.methods"


class PluginError(ValueError):
    """A name of the form ``module:attribute`` that leads nowhere, or a plug-in that fails."""


def import_object(path: str) -> object:
    """Import what ``path`` names.

    Parameters
    ----------
    path : str
        ``package.module:attribute``.

    Returns
    -------
    object
        The attribute, unchecked.

    Raises
    ------
    PluginError
        If the module cannot be imported or has no such attribute.
    """
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
        raise PluginError(f"module {module_name!r} cannot be imported: {_told(error)}") from error
    try:
        attribute_value: object = getattr(module, attribute)
        return attribute_value
    except AttributeError:
        raise PluginError(f"module {module_name!r} has no attribute {attribute!r}") from None


def installed_plugins() -> EntryPoints:
    """Entry points of installed packages; not loaded."""
    return entry_points(group=GROUP)


def load_plugin(point: EntryPoint) -> object:
    """Load what an entry point leads to.

    Raises
    ------
    PluginError
        If that fails; the text says where.
    """
    try:
        return point.load()
    except Exception as error:  # whatever another package's code does
        raise PluginError(f"{point.value} cannot be loaded: {_told(error)}") from error


def plugged_in(kind: str, name: str) -> str | None:
    """Find a model, data set or distiller that an installed package brings.

    Parameters
    ----------
    kind : str
        ``models``, ``datasets`` or ``distillers``.
    name : str
        Its name.

    Returns
    -------
    str or None
        Its ``module:attribute``; None if no package brings one of that name.
    """
    for point in installed_plugins():
        try:
            table = getattr(load_plugin(point), kind, {})
        except PluginError:
            continue  # another plug-in that is broken is named where it is asked for
        if name in table:
            return str(table[name])
    return None


def _told(error: Exception) -> str:
    """An error with the line that raised it, or that cannot be read."""
    if isinstance(error, SyntaxError):
        file, line, reason = error.filename, error.lineno, error.msg
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        file, line, reason = frame.filename, frame.lineno, str(error)
    return f"{type(error).__name__}: {reason} ({file}, line {line})"
