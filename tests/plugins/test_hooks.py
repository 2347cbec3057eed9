"""Hooks of another package: by entry point, and by module:object."""

import json
import re
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from safetensors.numpy import load_file

from flwr_distill.server.app import main
from flwr_distill.server.named_hooks import find_hooks
from flwr_distill.task.errors import SettingsError

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
NODES = 2
QUICK = {
    "strategy": "fedavg",
    "num-rounds": 2,
    "min-nodes": NODES,
    "partition.scheme": "iid",
    "train.local-epochs": 1,
}


def example():
    """The example in docs/plugins.md."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "class Tally" in block]
    return block


@pytest.fixture
def play(client_grid, tmp_path):
    """Run our ServerApp; give the run's folder, and the grid."""

    def play(hooks, name="1", **settings):
        config = {**QUICK, "hooks": hooks, "runs-dir": str(tmp_path / "runs"), **settings}
        play.grid = client_grid(NODES, config)
        main(play.grid, Context(int(name), 1, {}, RecordDict(), config))
        return tmp_path / "runs" / name

    return play


@pytest.mark.parametrize("name", ["tally", "my_tally:Tally", "my_tally:tally"])
def test_the_example_sees_each_round_of_a_run_that_names_it(install, play, name):
    source = f"{example()}\n\ntally = Tally()\n"
    install("my_tally", source, hooks={"tally": "my_tally:Tally"})
    folder = play(name)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    table = (folder.parent / "rounds.csv").read_text().splitlines()
    assert table == [f"1,{row['round']},{row['accuracy']}" for row in rows]
    assert len(table) == 3


def test_an_installed_hook_that_no_run_names_is_not_imported(install, play):
    install("unwanted", "raise RuntimeError('imported')", hooks={"unwanted": "unwanted:Hook"})
    assert (play("") / "summary.json").exists()


def test_a_hook_that_fails_changes_no_result_and_is_in_the_report(install, play):
    source = """
from flwr_distill.server.hooks import Hook

class Broken(Hook):
    def on_phase(self, phase):
        raise OSError("no such service")
"""
    install("my_broken", source, hooks={"broken": "my_broken:Broken"})
    broken, plain = play("broken"), play("", name="2")
    first, second = (load_file(folder / "model.safetensors") for folder in (broken, plain))
    assert all((first[name] == second[name]).all() for name in first)
    page = (broken / "report.html").read_text()
    assert "Hook broken is switched off" in page
    assert "my_broken.py, line 6" in page


@pytest.mark.parametrize(
    ("hooks", "named"),
    [
        ("taly", "taly.*tally"),
        ("tally,nowhere:Hook", "nowhere"),
        ("tally, tally", "tally"),
        ("json:loads", "json:loads.*cannot be made"),
        ("my_tally:NUMBER", "my_tally:NUMBER.*int"),
        ("fails", "fails.*no key.*my_tally.py"),
        ("my_tally:Misspelt", "on_rounds_end.*did you mean on_round_end"),
    ],
)
def test_a_name_that_leads_to_no_hook_is_refused_before_any_node_is_asked(
    install, play, hooks, named
):
    source = f"{example()}\n\nNUMBER = 7\n\ndef fails():\n    raise KeyError('no key')\n"
    source += "class Misspelt(Hook):\n    def on_rounds_end(self, end): ...\n"
    install("my_tally", source, hooks={"tally": "my_tally:Tally", "fails": "my_tally:fails"})
    with pytest.raises(SettingsError, match=f"hooks = .*{named}"):
        play(hooks)
    assert play.grid.pushed == []


def test_two_packages_with_one_name_are_both_named(install):
    for package in ("one", "two"):
        install(package, example(), name=package, hooks={"tally": f"{package}:Tally"})
    with pytest.raises(SettingsError, match=r"one==1\.0 and two==1\.0"):
        find_hooks("tally")


def test_a_resumed_run_may_name_other_hooks_and_they_see_the_rounds_that_are_over(install, play):
    source = """
from flwr_distill.server.hooks import Hook

class Rows(Hook):
    def on_run_start(self, run):
        (run.folder / "rows").write_text(" ".join(str(row.round) for row in run.rows))
"""
    install("my_rows", source, hooks={"rows": "my_rows:Rows"})
    play("")
    folder = play("rows", name="1", resume="1", **{"num-rounds": 3})
    assert (folder / "rows").read_text() == "0 1 2"
