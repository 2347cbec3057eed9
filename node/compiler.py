"""Puts off the import of PyTorch's compiler until something is compiled.

PyTorch's optimisers import it at their first use, to keep it out of their own code. That takes
nearly as long as PyTorch itself, and 140 MB; and until something is compiled, there is nothing to
keep it out of.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


class PutOff(ModuleType):
    """Stands in for the compiler: all that optimisers want of it, for as long as it is not there.

    Whoever wants anything else has it imported, and from then on everyone has the compiler itself.
    """

    def __init__(self) -> None:
        super().__init__(COMPILER, PutOff.__doc__)
        self._lock = threading.RLock()
        self._compiler: ModuleType | None = None

    def graph_break(self, msg: str = "") -> None:
        """Do nothing, as the compiler's does in code that is not being compiled."""

    def disable(
        self, fn: Callable[..., Any] | None = None, recursive: bool = True, **named: Any
    ) -> Callable[..., Any]:
        """Keep a function from being compiled; call it as it is while there is no compiler."""
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
        return getattr(self._import(), name)

    def _import(self) -> ModuleType:
        with self._lock:
            if sys.modules.get(COMPILER) is self:
                del sys.modules[COMPILER]
                vars(sys.modules["torch"]).pop("_dynamo", None)
            compiler = importlib.import_module(COMPILER)
            self._compiler = compiler
        return compiler


def put_off_compiler() -> None:
    """Have the compiler imported at its first real use, if PyTorch is here and it is not yet."""
    torch = sys.modules.get("torch")
    if torch is not None and COMPILER not in sys.modules:
        sys.modules[COMPILER] = vars(torch)["_dynamo"] = PutOff()
