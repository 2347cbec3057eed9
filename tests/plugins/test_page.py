"""The package and the command of docs/plugins.md, as they are printed."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from flwr.common.config import flatten_dict, fuse_dicts, parse_config_args

from flwr_distill.protocol.registry import find_method
from flwr_distill.server.settings import RunSettings
from tests.docs.pages import files

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "plugins.md"


def test_its_package_runs_with_setting_phase_handler_loss_term_and_panel(install, run, sent):
    site = install("unused", "", fall="my_pkg.method:METHOD")
    (site / "my_pkg").mkdir()
    for name, content in files(PAGE).items():
        (site / name).write_text(content)
    folder = run(strategy="fall", fall__by=0.5, fall__weight=0.2)
    trains = [message.content for message in sent("train")]
    assert [content["config"]["lr"] for content in trains] == pytest.approx(
        [0.05] * 3 + [0.025] * 3
    )
    assert {content["calm"]["weight"] for content in trains} == {0.2}
    assert len(sent("query.fall_ask")) == 3
    report = (folder / "report.html").read_text()
    assert all(text in report for text in ("A note", "nodes answer", "its paper, eq. 3"))


def test_flowers_command_takes_settings_of_a_package_as_json_alone():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    (line,) = re.findall(r"^flwr run .*strategy-args.*", PAGE.read_text(), re.MULTILINE)
    given = parse_config_args([shlex.split(line)[-1]])
    settings = RunSettings.from_run_config(fuse_dicts(flatten_dict(declared), given))
    assert settings.of_method(find_method("fedproto")).weight == 0.1
    with pytest.raises(ValueError, match="fedproto"):
        fuse_dicts(flatten_dict(declared), {"fedproto.weight": 0.1})
