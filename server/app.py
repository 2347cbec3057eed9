"""The ServerApp: runs a federation from its run config."""

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from logging import WARNING

from flwr.app import Context
from flwr.common import log
from flwr.serverapp import Grid, ServerApp

from flwr_distill.base import json_lines
from flwr_distill.base.text import listed
from flwr_distill.protocol.arrays import as_arrays
from flwr_distill.protocol.meeting import requirement_of
from flwr_distill.protocol.registry import phases_of, summed_in
from flwr_distill.server.columns import check_scale, run_scale
from flwr_distill.server.edge import Commands, EdgeRounds, check_below, commands_from_above
from flwr_distill.server.grid.buffer import buffer_of
from flwr_distill.server.grid.codec import codec_of_run
from flwr_distill.server.grid.failures import Failures
from flwr_distill.server.grid.grid import RunGrid
from flwr_distill.server.grid.node_counts import NodeCounts
from flwr_distill.server.grid.screening import Screening
from flwr_distill.server.grid.secure_sums import SecureSums
from flwr_distill.server.grid.transport import Transport
from flwr_distill.server.hooks import Hooks
from flwr_distill.server.line import module_of_line
from flwr_distill.server.named_hooks import find_hooks
from flwr_distill.server.names import names_in_log
from flwr_distill.server.own_loop import observed
from flwr_distill.server.own_work import OwnWork
from flwr_distill.server.privacy import check_privacy, check_private_model, check_secure_sums
from flwr_distill.server.record.history import History
from flwr_distill.server.record.hooks import hooks_of_run
from flwr_distill.server.record.journal import Journal
from flwr_distill.server.record.metrics import serve_metrics
from flwr_distill.server.record.phase_file import PHASE, Phase, PhaseFile
from flwr_distill.server.record.recorder import SUMMARY
from flwr_distill.server.record.resume import (
    checkpoint_to_resume,
    find_run_to_resume,
    lock_run_folder,
    way_to_resume,
)
from flwr_distill.server.record.writing import results_in
from flwr_distill.server.roster import Roster, meet_nodes
from flwr_distill.server.rounds import Rounds
from flwr_distill.server.scoring import check_scoring
from flwr_distill.server.settings import RunSettings
from flwr_distill.server.statistics import ask_for_statistics, check_statistics
from flwr_distill.server.strategy import method_of_start, settings_of_start, strategy_of_run
from flwr_distill.server.task import Task
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.registry import find_strategy
from flwr_distill.task.backbones import fingerprint
from flwr_distill.task.compute.precision import products_in
from flwr_distill.task.source import check_columns, data_spec, open_columns

BUSY_PHASES = 10
"""Phases' timeouts for which a run waits at its start for nodes that are busy with others."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a federation by its run config; below an edge, answer the messages from above."""
    if shutdown := module_of_line("shutdown"):
        shutdown.ignore_signals_at_the_end()
    json_lines.begin("serverapp", run=str(context.run_id))
    settings = RunSettings.from_run_config(context.run_config)
    with commands_from_above(settings.edge) as commands:
        _run(grid, context, settings, commands)


def _run(grid: Grid, context: Context, settings: RunSettings, commands: Commands | None) -> None:
    check_statistics(settings)
    check_secure_sums(settings, find_strategy(settings.strategy)[1])
    settings = settings.defended(find_strategy(settings.strategy)[1])
    strategy_class, method = find_strategy(settings.strategy)  # the defence may take another
    buffer = buffer_of(settings, method)
    codec = codec_of_run(settings, method)
    check_privacy(settings, method)
    check_below(settings, strategy_class, method)
    check_columns(settings, edge=bool(settings.edge))
    other_hooks = find_hooks(settings.hooks)
    start_method, start_settings = method_of_start(settings, method), settings_of_start(settings)
    if unread := settings.unread(method, start_method):
        keys = listed(unread)
        log(WARNING, "strategy = %r does not read %s: of other methods", settings.strategy, keys)
    check_privacy(start_settings, start_method)
    task = Task.of(settings)
    check_private_model(settings, task.model, task.spec)
    check_scoring(
        settings, method, num_classes=task.spec.num_classes, tests=task.evaluate is not None
    )
    frozen = fingerprint(task.model)
    requirement = requirement_of(method, settings.of_method(method), frozen, task.spec.labels)
    directory = Directory(requirement, settings.most_samples, task.class_names)
    strategy = strategy_of_run(settings, observed(strategy_class), method, task, directory)
    start = None
    if start_method:
        start = strategy_of_run(start_settings, *find_strategy(start_method.name), task, directory)
    folder = find_run_to_resume(settings, context.run_id)
    with (
        products_in("float32"),
        names_in_log(directory.names),
        results_in(folder, way_to_resume(strategy, folder)),
        lock_run_folder(folder),
    ):
        checkpoint = checkpoint_to_resume(settings, folder, task.fingerprint)
        (folder / SUMMARY).unlink(missing_ok=True)  # of the run that this one resumes
        serve_metrics(folder)
        with Journal(folder / "journal.jsonl", checkpoint.round if checkpoint else None) as journal:
            if shutdown := module_of_line("shutdown"):
                shutdown.at_the_end(journal.stop)
            hooks = Hooks(journal, others=other_hooks)
            phases = phases_of(method, start_method, secure_sums=settings.secure_sums)
            start_model = as_arrays(task.start)
            screening = Screening(phases, directory, start_model, settings.norm_threshold)
            sums = None
            if settings.secure_sums and method:
                sums = SecureSums(
                    screening,
                    summed=summed_in(method),
                    longest=settings.secure_sums_norm,
                    run_id=context.run_id,
                    run_config=context.run_config,
                )
            counts = NodeCounts(
                task.spec.num_classes, wanted=settings.evaluate.counts, seed=settings.seed
            )
            failures = Failures(journal)
            transport = Transport(
                grid, settings.phase_timeout, failures, directory.names, start_model, codec
            )
            phase_file = transport.phase_file = PhaseFile(
                folder / PHASE,
                context.run_id,
                lambda: (journal.round, transport.ledger.server_bytes),
            )
            phase_file.begin()
            run_grid = RunGrid(
                transport,
                screening,
                sums,
                phases=phases,
                seed=settings.seed,
                quorum=settings.quorum,
                hooks=hooks,
                counts=counts,
                buffer=buffer,
            )
            first = checkpoint.nodes.values() if checkpoint else ()
            directory.resumes = str(checkpoint.run_id) if checkpoint else ""
            if checkpoint:
                directory.class_names = tuple(checkpoint.record["classes"])
            roster = Roster(directory, task.tested, task.spec.num_classes)
            if settings.statistics:
                ask_for_statistics(run_grid, roster, settings, task.spec, folder)
                task = replace(task, evaluate=None)
            else:
                columns = open_columns(settings)
                directory.scale = run_scale(run_grid, columns, settings, checkpoint)
                seconds = settings.phase_timeout
                patience = BUSY_PHASES * seconds
                least, now = settings.min_nodes, time.monotonic()
                meeting = Phase("nodes connect", now, now + seconds, least)
                meet_nodes(
                    run_grid,
                    roster,
                    least,
                    seconds,
                    first,
                    patience=patience,
                    on_wait=lambda missing: phase_file.show(meeting, (), missing),
                )
                phase_file.end()
                check_scale(directory.scale, columns)
                if directory.scale:
                    task = replace(task, spec=data_spec(settings, scale=directory.scale))
                getattr(strategy, "check_nodes", lambda count: None)(len(roster.nodes))
            trains = not settings.statistics
            if trains and task.evaluate is None and not settings.fraction_evaluate:
                log(
                    WARNING,
                    "The model's accuracy will be unknown: the server has no test samples, and "
                    "fraction-evaluate is 0 (set it to 1.0, and nodes test on held-out ones)",
                )
            history = History(
                run_grid.ledger,
                journal,
                checkpoint.record if checkpoint else None,
                counts=counts,
                best_by=settings.best_metric,
                seed=settings.seed,
            )
            with hooks_of_run(
                folder, settings, history, directory.class_name, other_hooks.values()
            ) as own_hooks:
                hooks.add(*own_hooks)
                rounds_of = Rounds if commands is None else partial(EdgeRounds, commands=commands)
                rounds = rounds_of(
                    settings=settings,
                    run_id=context.run_id,
                    folder=folder,
                    task=task,
                    method=method,
                    strategy=strategy,
                    grid=run_grid,
                    roster=roster,
                    history=history,
                    journal=journal,
                    hooks=hooks,
                    start=start,
                )
                watched = OwnWork(transport, settings.phase_timeout)
                # between its rounds, an edge waits for those above
                with watched if commands is None else nullcontext():
                    rounds.run(checkpoint)
