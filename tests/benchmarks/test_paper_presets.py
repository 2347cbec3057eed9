"""Every preset that names a paper has its values, or says why not, setting by setting."""

import pytest

from benchmarks.papers.facts import read_facts
from benchmarks.papers.presets import OFF, Ours, problems, read_mappings, unmapped
from benchmarks.papers.tables import read_preset
from flwr_distill.flower.own_app import PRESETS

FACTS, MAPPINGS = read_facts(), read_mappings()
CASES = {name: paper for paper, mapped in MAPPINGS.items() for name in mapped.presets}


def found(name, changes=None, mapped=None):
    """Problems of a preset, with changes."""
    paper = CASES[name]
    preset = {**read_preset(name), **(changes or {})}
    return [*problems(mapped or MAPPINGS[paper], FACTS[paper], name, preset)]


def test_every_preset_of_a_paper_is_compared():
    assert MAPPINGS.keys() == FACTS.keys()
    names = {file.stem for file in PRESETS.glob("*.toml")}
    of_papers = {name for name in names if name.startswith(tuple(f"{own}-" for own in FACTS))}
    assert {*CASES} == of_papers


@pytest.mark.parametrize("paper", FACTS)
def test_every_stated_value_is_mapped_or_said_to_be_nowhere(paper):
    assert unmapped(MAPPINGS[paper], FACTS[paper]) == []


@pytest.mark.parametrize("name", CASES)
def test_a_preset_has_the_papers_values_or_a_reason(name):
    assert found(name) == []


@pytest.mark.parametrize("paper", FACTS)
def test_every_deviation_and_choice_is_that_of_a_preset(paper):
    mapped = MAPPINGS[paper]
    for ours in (*mapped.deviations.values(), *mapped.chosen.values()):
        assert {*ours.presets} <= mapped.presets.keys()
        assert ours.reason


OTHER_TEXTS = {"strategy": "fedavg", "dataset": "digits", "model": "auto", "train.optimizer": "sgd"}
OTHER_TEXTS |= {"partition.scheme": "iid"}


@pytest.mark.parametrize("name", CASES)
def test_any_other_value_in_a_preset_is_a_problem(name):
    """Mutants: each number and switch of each preset is changed, and some texts."""
    for key, value in read_preset(name).items():
        if isinstance(value, bool):
            other = not value
        elif isinstance(value, str):
            other = OTHER_TEXTS.get(key, value)
        else:
            whole = value - 1 if value > 1 else value + 1
            other = whole if isinstance(value, int) else value / 2 or 0.25
        if other != value:
            assert any(text.startswith(key) for text in found(name, {key: other})), key


def test_what_no_paper_has_may_not_be_left_on():
    name = next(name for name, paper in CASES.items() if paper == "hfldd")
    for key, on in {"hfldd.rotate": True, "hfldd.average-last": 0.25, "most-samples": 10.0}.items():
        assert key in OFF
        assert any(text.startswith(key) for text in found(name, {key: on}))


def test_a_stale_deviation_is_a_problem():
    name = next(name for name, paper in CASES.items() if paper == "hfldd")
    mapped = MAPPINGS["hfldd"]
    stale = {**mapped.deviations, "num-rounds": Ours(value=200, reason="was so")}
    (text,) = found(name, mapped=mapped.model_copy(update={"deviations": stale}))
    assert text.startswith("num-rounds")


def test_a_new_fact_that_is_not_mapped_is_a_problem():
    facts = FACTS["hfldd"]
    more = facts.model_copy(update={"hyperparameters": {**facts.hyperparameters, "decay": 0.1}})
    assert unmapped(MAPPINGS["hfldd"], more) == ["decay: stated by the paper, not mapped"]
