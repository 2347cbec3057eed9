"""Imports of Opacus, which sets up Python's root logger: every line would be printed twice."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def root_logger_unchanged() -> Iterator[None]:
    """Keep an import from adding handlers to the root logger."""
    root = logging.getLogger()
    before = [*root.handlers]
    try:
        yield
    finally:
        root.handlers[:] = before
