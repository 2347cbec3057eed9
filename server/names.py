"""Replaces node ids by names in the log and in errors."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from flwr_distill.task.errors import ReportedError

FLOWER_LOGGER = logging.getLogger("flwr")
"""The logger of `flwr.common.log`."""

_NODE = re.compile(r"\b(?:[Nn]ode )?(\d{15,20})\b")
"""Flower's node ids are random 64-bit numbers, so no other number is mistaken for one."""


def named(text: str, name: Callable[[str], str | None]) -> str:
    """Replace node ids by names: ``Node 1234567890123456 failed`` -> ``ward-3 failed``.

    `name` gives the name for an id, or None to leave the id.
    """
    return _NODE.sub(lambda match: name(match[1]) or match[0], text)


@contextmanager
def names_in_log(names: Mapping[int, str]) -> Iterator[None]:
    """Call nodes by name in Flower's log, and in the error that ends the block.

    `names` are by node id; they may grow in the block.
    """

    def name(node: str) -> str | None:
        return names.get(int(node))

    def rename(record: logging.LogRecord) -> bool:
        record.msg, record.args = named(record.getMessage(), name), ()
        return True

    FLOWER_LOGGER.addFilter(rename)
    try:
        yield
    except Exception as error:
        error.args = tuple(named(a, name) if isinstance(a, str) else a for a in error.args)
        if isinstance(error, ReportedError):
            error.problem, error.where = named(error.problem, name), named(error.where, name)
        raise
    finally:
        FLOWER_LOGGER.removeFilter(rename)
