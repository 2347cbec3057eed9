"""Objects named by the user as ``module:attribute``: how other packages plug in."""

import importlib


class PluginError(ValueError):
    """A name of the form ``module:attribute`` that leads nowhere."""


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
    try:
        found: object = getattr(module, attribute)
    except AttributeError:
        raise PluginError(f"module {module_name!r} has no attribute {attribute!r}") from None
    return found
