"""`flwr-distill settings` at its command line."""

import json
import subprocess
import sys
import tomllib

import pytest
from flwr.common.config import parse_config_args

from flwr_distill.server.settings import RunSettings

from .commands import assert_refused, command

PLUGIN = """
from flwr_distill.protocol.method import Method
from flwr_distill.task.settings import Block

class Settings(Block):
    '''Settings of Acme.'''

    mu: float = 0.5
    '''Weight of it.'''

METHOD = Method("acme", "acme_methods:Acme", settings=Settings)
"""


def invoke(*arguments):
    return command("settings", *arguments)


def keys(*arguments):
    return [setting["key"] for setting in json.loads(invoke(*arguments, "--json").stdout)]


def test_all_settings_are_printed_with_default_values_and_meaning():
    output = invoke().output
    assert output.index("num-rounds") < output.index("train.lr") < output.index("hfldd.groups")
    (line,) = (line for line in output.splitlines() if line.startswith("  train.momentum "))
    assert " ".join(line.split()) == (
        "train.momentum 0.0 Momentum of `sgd`. (number: at least 0, below 1)"
    )
    assert "flwr-distill run -c 'dataset=\"digits\"'" in output


def test_a_narrow_terminal_shows_whole_keys(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert "fedhead.distill-weight-decay   0.0001" in invoke("fedhead").output


@pytest.mark.parametrize("name", ["fedhead", "fedhead-plus", "feddf"])
def test_a_method_is_shown_with_the_table_that_it_shares(name):
    assert {key.split(".")[0] for key in keys(name)} == {"fedhead"}
    assert f"-c 'strategy=\"{name}\" fedhead.distill-epochs=20'" in invoke(name).output


def test_one_table_can_be_asked_for():
    assert "num-rounds" in keys("core")
    assert not [key for key in keys("core") if "." in key]
    assert {key.split(".")[0] for key in keys("train")} == {"train"}


def test_a_method_without_settings_says_so():
    result = invoke("fedavg")
    assert result.exit_code == 0
    assert "fedavg has no settings of its own" in result.output
    assert keys("fedavg") == []


def test_a_method_whose_loss_term_a_general_setting_turns_on_shows_that():
    assert keys("fedprox") == ["train.proximal-mu"]
    assert 'strategy="fedprox" train.proximal-mu=' in invoke("fedprox").output


def test_an_unknown_name_is_one_line_with_the_nearest_and_all():
    result = invoke("hfld")
    unknown = "flwr-distill: hfld: not a table or method: "
    assert_refused(
        result, unknown, "did you mean hfldd?", "core", "train", "fedhead-plus", "moon", "krum"
    )


def test_json_tells_programs_everything():
    (momentum,) = (s for s in json.loads(invoke("--json").stdout) if s["key"] == "train.momentum")
    assert momentum == {
        "key": "train.momentum",
        "table": "train",
        "methods": [],
        "type": "number",
        "default": 0.0,
        "bounds": "at least 0, below 1",
        "schema": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        "meaning": "Momentum of `sgd`.",
    }


@pytest.mark.parametrize("name", [(), ("train",), ("fedhead-plus",), ("fedavg",)])
def test_a_preset_is_what_flower_takes_for_a_run_config(name, tmp_path):
    file = tmp_path / "mine.toml"
    result = invoke(*name, "--preset", file)
    assert result.output == f"flwr-distill run -c {file}\n"
    settings = RunSettings.from_run_config(parse_config_args([str(file)]))
    strategy = name[0] if name and name[0] != "train" else "hfldd"
    expected = RunSettings.from_run_config({"strategy": strategy})
    assert settings.model_dump() == expected.model_dump()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mine", "must be a .toml file"),
        ("no/mine.toml", "No such file or directory"),
        ("theirs.toml", "File exists"),
    ],
)
def test_a_preset_that_cannot_be_written_or_read_is_an_error(name, why, tmp_path):
    (tmp_path / "theirs.toml").write_text("seed = 7\n")
    assert_refused(invoke("--preset", tmp_path / name), tmp_path / name, why)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["seed = 7\n"]


def test_settings_of_an_installed_package_are_shown_and_written_as_those_of_any_method(
    install, tmp_path
):
    install("colours", PLUGIN, name="acme", acme="colours:METHOD", broken="colours:NOTHING")
    assert "acme.mu" in keys()
    assert "-c 'strategy=\"acme\" acme.mu=0.5'" in invoke("acme").output
    invoke("acme", "--preset", tmp_path / "acme.toml")
    written = tomllib.loads((tmp_path / "acme.toml").read_text())
    assert written == {"strategy": "acme", "acme": {"mu": 0.5}}
    invoke("--preset", tmp_path / "all.toml")
    assert "acme" not in tomllib.loads((tmp_path / "all.toml").read_text())


def test_settings_that_clash_are_one_line(install):
    source = PLUGIN.replace("settings=", "table='train', settings=")
    install("colours", source, name="acme", acme="colours:METHOD")
    assert_refused(invoke(), "acme==1.0")


def test_the_command_of_a_node_does_not_import_torch_for_it():
    code = "import sys, flwr_distill.cli.main; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr
