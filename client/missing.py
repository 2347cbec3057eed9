"""What a node is missing for a run, reported before any node trains."""

import json
from collections.abc import Callable, Iterable

from flwr.app import Context

from flwr_distill.client.dp_sgd import require_single_gradients
from flwr_distill.client.local_round import start_of
from flwr_distill.client.session import Session, source_of
from flwr_distill.client.terms import term_class
from flwr_distill.links import introduce
from flwr_distill.protocol.meeting import MAX_REASONS, Requirement, one_line
from flwr_distill.protocol.method import Method, all_protected
from flwr_distill.protocol.registry import all_methods, find_method
from flwr_distill.task.columns import FAR, dwarfed
from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.plugin import import_object
from flwr_distill.task.source import open_columns

Check = Callable[[], object]


def missing_for(context: Context, requirement: Requirement | None) -> list[str]:
    """What the node is missing for a run, a line each with the remedy; empty if nothing.

    Tried are its data and links, the model, and the method's code, terms and `Method.needs`.
    """
    reasons = _failing(
        [
            lambda: introduce(Session.of(context, scaled=False)),
            lambda: (requirement or Requirement()).check_labels(_spec(context).labels),
            lambda: _check_scale(context, requirement),
            lambda: _check_model(context, requirement),
            lambda: _import_code(requirement),
            lambda: _check_terms(context, requirement),
        ]
    )
    if not reasons and requirement and requirement.method:
        needs: list[Check] = []
        reasons = _failing([lambda: needs.extend(_needs(context, requirement))]) or _failing(needs)
    return reasons[:MAX_REASONS]


def _failing(checks: Iterable[Check]) -> list[str]:
    """Distinct reasons of the checks that fail."""
    reasons = []
    for check in checks:
        try:
            check()
        except RuntimeError:
            raise  # CUDA's: the worker reads them, and may restart
        except Exception as error:  # whatever a plug-in raises
            name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            reasons.append(one_line(f"{name}{error}"))
    return list(dict.fromkeys(reasons))


def _spec(context: Context) -> DataSpec:
    source = source_of(context)
    return source.spec(context, source.task(context))


def _check_scale(context: Context, requirement: Requirement | None) -> None:
    """Check a scale from secure sums, whose parts the server cannot compare."""
    scale = requirement and requirement.scale
    if not scale or not context.run_config.get("secure-sums"):
        return
    own = Session.of(context, scaled=False).own.moments
    if own and (odd := dwarfed(own, scale)):
        name = open_columns(source_of(context).task(context))[odd[0]]
        raise SettingsError(
            f"this node's values are within 1/{FAR:g} of the deviation over all nodes",
            where=f"column {name!r}",
            remedy="check its unit on all nodes, or state its scale, "
            f"private.columns={name}:MEAN+-DEVIATION",
        )


def _check_model(context: Context, requirement: Requirement | None) -> None:
    source = source_of(context)
    task = source.task(context)
    own = start_of(context.run_id, source, task, _spec(context))[1]
    if requirement and requirement.frozen not in ("", own):
        raise SettingsError(
            "it has another frozen network on this node than on the server",
            where="model",
            value=task.model,
            remedy="install the same version of its package, or copy its file",
        )


def _method(requirement: Requirement) -> Method:
    method = find_method(requirement.method)
    if method is None:
        raise SettingsError(
            "its package is missing on this node",
            where="strategy",
            value=requirement.method,
            remedy=f"pip install '{requirement.package}' where the node runs, and start the run "
            "again",
        )
    return method


def _import_code(requirement: Requirement | None) -> None:
    if requirement is None or not requirement.method:
        return
    method = _method(requirement)
    for phase in method.phases:
        if phase.handler:
            import_object(phase.handler)
    for key in method.terms:
        term_class(method, key)


def _check_terms(context: Context, requirement: Requirement | None) -> None:
    """Check that differential privacy allows the terms that are certain to take part.

    Those are terms that a key of ``train.*`` asks for, and terms of a method which declares that
    differential privacy covers all.
    """
    train = source_of(context).task(context).train
    if not train.dp_noise:
        return
    numbers, own = train.model_dump(by_alias=True), requirement and requirement.method
    for method in all_methods().values():
        covered = method.name == own and method.unprotected is all_protected
        for key in method.terms:
            if covered or numbers.get(key):
                require_single_gradients(train.dp_noise, term_class(method, key), method.name)


def _needs(context: Context, requirement: Requirement) -> Iterable[Check]:
    method = _method(requirement)
    if not method.needs:
        return ()
    settings = method.settings and method.settings.checked(
        json.loads(requirement.settings), "message"
    )
    checks: Iterable[Check] = import_object(method.needs)(Session.of(context), settings)  # type: ignore[operator]
    return checks
