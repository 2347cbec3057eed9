"""Puts off the import of PyTorch's compiler until something is compiled.

Optimisers import it at their first use, to keep it out of their code: nearly as long as PyTorch
itself takes, and 140 MB.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


class PutOff(ModuleType):
    """Stands in for the compiler: all that optimisers want of it, until it is imported.

    Any other use imports it, and from then on everyone has the compiler itself.
    """

    def __init__(self) -> None:
        super().__init__(COMPILER, PutOff.__doc__)
        self._lock = threading.Lock()
        self._compiler: ModuleType | None = None

    def graph_break(self, msg: str = "") -> None:
        """Do nothing, as the compiler's does in code that is not being compiled."""

    def disable(
        self, fn: Callable[..., Any] | None = None, recursive: bool = True, **named: Any
    ) -> Callable[..., Any]:
        """Keep a function from being compiled; call it directly while there is no compiler."""
        if fn is None or named != {"wrapping": False}:  # not what optimisers ask for
            return self._import().disable(fn, recursive, **named)  # type: ignore[no-any-return]
        kept_out: Callable[..., Any] | None = None

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal kept_out
            if self._compiler is None:
                return fn(*args, **kwargs)
            if kept_out is None:
                kept_out = self._compiler.disable(fn, recursive, **named)
            return kept_out(*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        # Those who look through all modules ask for names such as __file__; __path__ is asked for
        # by the import of a module within.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {COMPILER!r} has no attribute {name!r}")
        if name == "__path__":
            sys.meta_path.insert(0, _Once())
        return getattr(self._import(), name)

    def _import(self) -> ModuleType:
        with self._lock:  # not during the import, which has locks of its own
            if sys.modules.get(COMPILER) is self:
                del sys.modules[COMPILER]
                vars(sys.modules["torch"]).pop("_dynamo", None)
        self._compiler = importlib.import_module(COMPILER)
        return self._compiler


class _Once(MetaPathFinder, Loader):
    """Finds the compiler's modules that are there already, for an import that asks again.

    It would load a second copy of a module otherwise, whose settings have no effect.
    """

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        module = sys.modules.get(name)
        if module is None or target is not None or not name.startswith(f"{COMPILER}."):
            return None
        return ModuleSpec(name, self, loader_state=module.__spec__)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__  # now ours, except where the module lets nobody set it
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state


def put_off_compiler() -> None:
    """Have the compiler imported at its first real use, if PyTorch is here and it is not yet."""
    torch = sys.modules.get("torch")
    if torch is not None and COMPILER not in sys.modules:
        sys.modules[COMPILER] = vars(torch)["_dynamo"] = PutOff()
