"""Names of a package that are imported at their first use."""

from collections.abc import Callable
from importlib import import_module


def lazily(package: str, **modules: str) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a package, which takes each name from the given module of it.

    A method's declaration is read by nodes, whose policy does without its strategy and PyTorch.
    """

    def attribute(name: str) -> object:
        if name in modules:
            return getattr(import_module(f"{package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute
