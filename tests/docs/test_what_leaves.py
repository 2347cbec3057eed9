"""The page on what leaves a node says of every strategy what it declares."""

import re
import tomllib
from functools import cache

import pytest

from flwr_distill.protocol.registry import all_methods
from flwr_distill.server.privacy import check_privacy, check_secure_sums
from flwr_distill.server.settings import RunSettings
from flwr_distill.server.strategy import strategy_of_run
from flwr_distill.server.task import Task
from flwr_distill.strategies.common.directory import Directory
from flwr_distill.strategies.common.registry import find_strategy
from flwr_distill.task.errors import SettingsError

from .pages import ROOT

NOISE = {"train.dp-noise": 1.0}
SUMS = {"secure-sums": True}
TASK = cache(lambda: Task.of(RunSettings.from_run_config({})))


def rows_of_strategies():
    """Cells of the table's rows on protections, by strategy."""
    rows, names = {}, []
    page = (ROOT / "docs" / "what-leaves.md").read_text()
    table = page.partition("## By strategy")[2].partition("\n\n**Below an edge**")[0]
    for line in re.findall(r"^\| (?!strategy).*", table, re.MULTILINE):
        strategies, _, _, private, summed = (cell.strip() for cell in line.strip("|").split("|"))
        names = re.findall("`([^`]+)`", strategies) or names
        for name in names:
            rows.setdefault(name, []).append((private, summed))
    return rows


def allowed(check, **config):
    run = RunSettings.from_run_config(config)
    strategy, method = find_strategy(run.strategy)
    try:
        check(run, method)
        if run.secure_sums:
            strategy_of_run(run, strategy, method, TASK(), Directory())
    except SettingsError:
        return False
    return True


def settings_in(cells):
    """Settings that cells of the table name."""
    reason = re.findall(r"`([\w.-]+=[^`]+)`", " ".join(cells))
    return {
        k: v for line in reason for k, v in tomllib.loads(f'"{line}'.replace("=", '"=', 1)).items()
    }


def private_by_itself(name, **config):
    run, method = RunSettings.from_run_config({"strategy": name, **config}), find_strategy(name)[1]
    return method.epsilon(run.of_method(method)) > 0


@pytest.mark.parametrize("name", sorted(all_methods()))
def test_a_strategy_has_the_protections_that_the_page_says(name):
    privates, sums = zip(*rows_of_strategies()[name], strict=True)
    with_these, summed_with = settings_in(privates), settings_in(sums)
    of_its_own = any(cell.startswith("by ") for cell in privates)
    assert private_by_itself(name, **with_these) == of_its_own
    assert not private_by_itself(name)
    private = allowed(check_privacy, strategy=name, **NOISE, **with_these)
    assert private == (not of_its_own and "no" not in privates)
    summed = any("mean" in cell for cell in sums)
    assert allowed(check_secure_sums, strategy=name, **SUMS, **summed_with) == summed
    assert allowed(check_secure_sums, strategy=name, **SUMS) == (summed and not summed_with)
    assert ("no" in sums) == (not summed)
