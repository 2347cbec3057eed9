"""The ServerApp: from a run config to a finished run."""

from collections.abc import Mapping
from functools import partial
from logging import INFO
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy
from torch import nn

from server.about import about_run, class_counts
from server.checkpoint import Checkpoint, save_checkpoint
from server.config import RunSettings
from server.evaluation import server_evaluation
from server.journal import Journal
from server.metrics import serve_metrics
from server.privacy import check_privacy
from server.report import RunRecorder
from server.resume import (
    Later,
    continue_on_nodes,
    counted_from,
    held,
    restore,
    run_to_go_on_with,
    state_of,
)
from server.roster import Roster, meet_nodes
from server.screening import ScreeningGrid
from strategies.arrays import array_types
from strategies.fedhead import FedHEAD
from strategies.hfldd import HFLDD
from strategies.registry import create_strategy
from strategies.traffic import fedavg_bits, fedhead_bits, fedseq_bits
from task.datasets import DataSpec, auxiliary_images
from task.models import create_model
from task.settings import SettingsError
from task.source import data_spec, test_samples

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Check the settings, meet the nodes, run the strategy under Flower's own loop, report."""
    settings = RunSettings.from_run_config(context.run_config)
    check_privacy(settings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec = data_spec(settings)
    model = create_model(settings.model, spec, seed=settings.seed)
    test = test_samples(settings)
    evaluate = server_evaluation(model, test.to_samples(spec), device) if test else None
    strategy = create_strategy(
        settings.strategy, _strategy_arguments(settings, model, spec), settings.strategy_args
    )
    folder, begun = run_to_go_on_with(settings, context.run_id)
    done = begun.round if begun else 0
    serve_metrics(folder)
    rounds = begun.round if begun else None
    with held(folder), Journal(folder / "journal.jsonl", rounds) as journal:
        metered = ScreeningGrid(
            grid,
            deadline=settings.phase_timeout,
            seed=settings.seed,
            journal=journal,
            quorum=settings.quorum,
            norm_threshold=settings.norm_threshold,
            types=array_types(model),
        )
        known = begun.nodes.values() if begun else ()
        roster = meet_nodes(metered, settings.min_nodes, settings.phase_timeout, known)
        metered.order = roster.order
        _check_against_nodes(settings, roster)
        if begun:
            continue_on_nodes(metered, begun, roster, settings.phase_timeout)
            restore(strategy, begun, roster)
            metered.begin_round(done + 1)

        record = begun.record if begun else None
        recorder = RunRecorder(folder, settings, metered.ledger, journal, record)
        recorder.write_json("about.json", about_run(spec, roster, recorder.started))
        start = begun.arrays if begun else ArrayRecord(model.state_dict())
        evaluate_and_record = recorder.recording(evaluate, partial(_topology, strategy, roster))

        def end_round(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_and_record(server_round, arrays)
            if roster.meet_new(metered, settings.phase_timeout):
                metered.order = roster.order
                recorder.write_json("about.json", about_run(spec, roster, recorder.started))
            checkpoint = Checkpoint(
                run_id=context.run_id,
                round=server_round,
                settings=settings.model_dump(by_alias=True),
                nodes=roster.names,
                arrays=arrays,
                state=state_of(strategy),
                record=recorder.state_dict(),
            )
            save_checkpoint(folder, checkpoint, settings.keep_checkpoints, recorder.best_round)
            metered.begin_round(server_round + 1)
            return metrics

        try:
            result = (Later(strategy, done) if begun else strategy).start(
                grid=metered,
                initial_arrays=start,
                num_rounds=settings.num_rounds - done,
                timeout=settings.phase_timeout,
                train_config=_train_config(settings),
                evaluate_fn=counted_from(done, end_round) if begun else end_round,
            )
        except Exception:
            recorder.break_off()
            raise
    recorder.write_json("partition.json", class_counts(settings, spec, roster))
    recorder.finish(
        result.arrays or start,
        _formula_bytes(strategy, settings, len(roster.names), start),
        getattr(strategy, "global_data", None),
    )


def _strategy_arguments(settings: RunSettings, model: nn.Module, spec: DataSpec) -> dict[str, Any]:
    """Constructor arguments on offer to any strategy; it takes those it knows."""
    arguments = {
        "fraction_train": settings.fraction_train,
        "fraction_evaluate": settings.fraction_evaluate,
        "min_available_nodes": 1,  # min-nodes were met; one that is lost must not hang a round
        "min_train_nodes": 1,
        "min_evaluate_nodes": 1,
        "proximal_mu": settings.train.proximal_mu,
        "links": settings.links,
        "phase_timeout": settings.phase_timeout,
        "seed": settings.seed,
        "model": model,
        "aggregator": _aggregator(settings),
        "spec": spec,
        "reference": partial(
            auxiliary_images,
            settings.fedhead.reference,
            spec,
            settings.fedhead.reference_size,
            settings.seed,
            settings.data_root or None,
        ),
    }
    return {
        **arguments,
        **settings.hfldd.strategy_arguments(),
        **settings.fedhead.strategy_arguments(),
        "layer": settings.train.feature_layer,
        **settings.cadis.model_dump(),
        **settings.fedlgd.model_dump(),
    }


def _aggregator(settings: RunSettings) -> Strategy | None:
    """What combines models in place of the weighted mean, where that is asked for."""
    if not settings.aggregator:
        return None
    return create_strategy(settings.aggregator, {}, settings.aggregator_args, "aggregator")


def _check_against_nodes(settings: RunSettings, roster: Roster) -> None:
    """Check what can be checked only once the nodes are known."""
    num_nodes = len(roster.names)
    if settings.strategy == "hfldd" and settings.hfldd.groups > num_nodes:
        raise SettingsError(
            f"hfldd.groups = {settings.hfldd.groups}, but there are {num_nodes} nodes "
            f"(set it to at most {num_nodes}, or 0 to have it chosen)"
        )


def _train_config(settings: RunSettings) -> ConfigRecord:
    """Local training settings, as every train message carries them."""
    return ConfigRecord(settings.train.model_dump(by_alias=True, exclude={"holdout"}))


def _topology(strategy: Strategy, roster: Roster) -> dict[str, Any] | None:
    """The strategy's clusters as they are now, with nodes by name; None where it has none."""
    topology = getattr(strategy, "topology", None)
    return topology.to_dict(roster.names) if topology else None


def _formula_bytes(
    strategy: Strategy, settings: RunSettings, num_nodes: int, arrays: ArrayRecord
) -> Mapping[str, float]:
    """The papers' traffic formulas for this run, in bytes (HFLDD, eq. 3, 18, 19; FedHEAD)."""
    num_weights = sum(array.numpy().size for array in arrays.values())
    rounds = settings.num_rounds
    bits = {"fedavg (eq. 3)": fedavg_bits(num_nodes, num_weights, rounds)}
    if isinstance(strategy, HFLDD) and strategy.topology:
        bits["hfldd (eq. 18)"] = strategy.expected_bits(num_weights, rounds)
        clusters = len(strategy.topology.clusters)
        bits["fedseq (eq. 19)"] = fedseq_bits(
            clusters, num_weights, rounds, clients_each=num_nodes // clusters
        )
    if isinstance(strategy, FedHEAD) and strategy.topology:
        sectors = len(strategy.topology.clusters)
        bits["fedhead (table 1)"] = fedhead_bits(sectors, num_weights, rounds)
    for name, size in bits.items():
        log(INFO, "Traffic by formula, %s: %.2f MB", name, size / 8e6)
    return {name: size / 8 for name, size in bits.items()}
