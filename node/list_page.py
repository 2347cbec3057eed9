"""Writes ``docs/asks.md`` (``make settings``): what a run can ask, what leaves, and its bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from flwr_distill.node.listed import BOUNDS, METRIC_BOUNDS, METRICS, SETTINGS
from flwr_distill.protocol.counts import COUNTS
from flwr_distill.protocol.messages import STATISTICS
from flwr_distill.protocol.method import Phase
from flwr_distill.protocol.registry import COMMON, built_in_methods, phases_of, summed_in
from flwr_distill.protocol.schema import Request
from flwr_distill.protocol.secure_sums import PHASES as SECURE_SUMS
from flwr_distill.protocol.statistics import ASK_STATISTICS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "asks.md"

_INTRODUCTION = """\
# What a run can ask of a node, what leaves, and what bounds it

<!-- Written by `make settings` from node/listed.py and protocol/; do not edit. -->

With `settings: listed`, as in the policy `hospital`, a node refuses every setting, message, record
and key that is not on this page, and every value out of its range, by an error that names the rule.
Bounds in `code` are keys of the [policy](policy.md). `evaluation-epsilon` alone means that the
message is refused where that is set; `secure-sums` that the answer is under masks in such a run. A
changed app can do more: [what a policy does not hold](policy.md#what-it-does-not-hold).
For an installed package the list is what [its methods declare](plugins.md#phases-and-handlers).
"""


def page() -> str:
    """Give the text of the page."""
    return "\n".join(
        [
            _INTRODUCTION,
            "## Settings of a run, and keys of messages\n",
            _table(("bound", "what that is", "settings and keys"), _by_bound(SETTINGS, BOUNDS)),
            "## Messages\n",
            "With records `pace` and `notice` besides, which the node's process reads.\n",
            _table(("message", "strategies", "may hold", "what leaves", "bounds"), _messages()),
            "## Records of messages\n",
            _table(("record", "keys"), sorted(_blocks())),
            "## Numbers in a reply's metrics and counts\n",
            _table(("bound", "what that is", "metrics"), _by_bound(METRICS, METRIC_BOUNDS)),
        ]
    )


def main() -> None:
    """Rewrite the page, if it has changed."""
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        PAGE.write_text(page(), encoding="utf-8")


def _by_bound(rows: Mapping[str, str], bounds: Mapping[str, str]) -> Iterable[tuple[str, ...]]:
    for bound in dict.fromkeys(rows.values()):
        names = ", ".join(f"`{name}`" for name, other in rows.items() if other == bound)
        words = bounds.get(bound, "a rule of the [policy](policy.md)")
        yield (bound if bound in bounds else f"`{bound}`", words, names)


def _messages() -> Iterable[tuple[str, ...]]:
    users: dict[tuple[str, ...], list[str]] = {}
    for name, method in built_in_methods().items():
        for phase in (*SECURE_SUMS, *phases_of(method).values()):
            summed = phase.message_type in summed_in(method)
            row = (
                f"`{phase.message_type}`",
                _records(phase),
                phase.leaves or "nothing of samples",
                ", ".join(f"`{key}`" for key in _bounds(phase, summed=summed)),
            )
            users.setdefault(row, []).append(name)
    every = len(built_in_methods())
    for (message_type, *rest), names in sorted(users.items()):
        yield (message_type, "all" if len(names) == every else ", ".join(names), *rest)


def _requests() -> Iterable[Request]:
    for method in built_in_methods().values():
        for phase in phases_of(method, secure_sums=bool(method.summed)).values():
            assert phase.request is not None  # a test checks it
            yield phase.request


def _records(phase: Phase) -> str:
    assert phase.request is not None
    configs = [f"`{name}`: {block.__name__}" for name, block in phase.request.configs.items()]
    return "; ".join([*configs, *(f"`{name}`: arrays" for name in phase.request.arrays)])


def _blocks() -> set[tuple[str, str]]:
    blocks = {block for request in _requests() for block in request.configs.values()}
    return {
        (
            block.__name__,
            ", ".join(field.alias or key for key, field in block.model_fields.items())
            + (", and numbers by rank" if block.model_config.get("extra") == "allow" else ""),
        )
        for block in blocks
    }


def _bounds(phase: Phase, *, summed: bool) -> Iterable[str]:
    yield "replies"
    if phase.message_type == ASK_STATISTICS:
        yield from (STATISTICS, "statistics-floor", "statistics-epsilon")
    if phase.message_type.startswith("evaluate"):
        yield "evaluation-epsilon"
        yield from ("most-evaluations", "fewest-held-out", "holdout") if phase.rates else ()
        yield from (COUNTS,) if any(COUNTS in reply.configs for reply in phase.replies) else ()
    elif phase.leaves and phase not in COMMON:
        yield "least-noise"
        yield "most-epsilon"
        if phase.shows_single:
            yield "single-updates" if not summed else "secure-sums"
    elif summed:
        yield "secure-sums"


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    main()
