"""The table at the end of a run."""

import io

from rich.console import Console

from flwr_distill.cli.results import results_table

RESULT = {
    **{"strategy": "hfldd", "accuracy": 0.9, "rounds": 3, "server_bytes": 1, "link_bytes": 2},
    "seconds": 3.0,
}


def test_warnings_of_the_runs_stand_below_their_table_once():
    warned = {**RESULT, "warnings": ["No node holds class 8 [of the test set]"]}
    console = Console(file=io.StringIO(), width=120)
    console.print(results_table("Runs", {"old": RESULT, "a": warned, "b": warned}))
    text = console.file.getvalue()
    assert text.count("No node holds class 8 [of the test set]") == 1


def test_at_80_columns_the_strategys_module_and_class_is_folded_and_not_cut():
    console = Console(file=io.StringIO(), width=80)
    name = "their_package.of_long_names.strategies:TheirStrategyWithALongName"
    console.print(results_table("Run", {name: RESULT}))
    text = console.file.getvalue()
    assert "…" not in text
    rows = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert "".join(rows) == name


def test_without_a_global_model_the_accuracy_is_that_on_nodes():
    own_models = {**RESULT, "accuracy": None, "node_accuracy": 0.875}
    console = Console(file=io.StringIO(), width=120)
    console.print(results_table("Runs", {"fedproto": own_models, "hfldd": RESULT}))
    assert "87.5 % on nodes" in console.file.getvalue()
    assert "90.0 % " in console.file.getvalue()
