"""Each kind of thing that a package may bring, from a package that is made for the test."""

import json
import unicodedata

import pytest

from flwr_distill.cli.source import load_source
from flwr_distill.distill.registry import distiller
from flwr_distill.protocol.method import Method
from flwr_distill.protocol.registry import all_methods, find_method, method_of, phases_of
from flwr_distill.server.settings import RunSettings
from flwr_distill.strategies.common.registry import find_strategy
from flwr_distill.task.datasets import DatasetError, DataSpec, load_dataset, load_private_data
from flwr_distill.task.datasets.images import read_image
from flwr_distill.task.errors import SettingsError
from flwr_distill.task.image_files import class_names
from flwr_distill.task.labels import LabelMap
from flwr_distill.task.models import create_model
from flwr_distill.task.plugin import installed_plugins
from flwr_distill.task.survey import survey

STRATEGY = '''
from flwr.serverapp.strategy import FedAvg

class Decay(FedAvg):
    """FedAvg whose learning rate falls by a tenth each round."""

    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] = 0.05 * 0.9 ** (server_round - 1)
        return super().configure_train(server_round, arrays, config, grid)
'''


@pytest.fixture
def rates():
    """Learning rates that nodes were told, in order; a ``broken`` of no node."""
    told = []

    def hear(node, message):
        if message.metadata.message_type == "train":
            told.append(message.content.config_records["config"]["lr"])
        return False

    hear.told = told
    return hear


def test_a_strategy_class_needs_an_entry_point_and_nothing_else(install, run, rates, rows):
    install("mine", STRATEGY, decay="mine:Decay")
    folder = run(strategy="decay", broken=rates)
    assert len(rows(folder)) == 3
    assert rates.told == pytest.approx([0.05] * 3 + [0.045] * 3)


def test_a_strategy_class_gets_strategy_args_and_no_other_settings(install, run):
    install("mine", STRATEGY, decay="mine:Decay")
    run(strategy="decay", strategy_args={"fraction_train": 0.5})
    with pytest.raises(SettingsError, match="colour"):
        run(strategy="decay", strategy_args={"colour": 1}, run_id=8)


def test_a_method_is_known_by_name_and_by_class_and_says_which_package_brings_it(install):
    source = STRATEGY + (
        "from flwr_distill.protocol.method import Method\n"
        "METHOD = Method('decay', 'mine:Decay', 'It decays.')\n"
    )
    install("mine", source, decay="mine:METHOD")
    method = find_method("decay")
    assert method == all_methods()["decay"]
    assert method.package == "someones==1.0"
    strategy, found = find_strategy("mine:Decay")
    assert found == method
    assert method_of(type("Child", (strategy,), {})) == method


SETTINGS = (
    STRATEGY
    + '''
from typing import Annotated
from pydantic import Field
from flwr_distill.protocol.method import Method
from flwr_distill.task.settings import Block

class FallSettings(Block):
    """How it falls."""
    by_a: Annotated[float, Field(gt=0, le=1)] = 0.9

class Fall(FedAvg):
    def __init__(self, by_a, **kwargs):
        super().__init__(**kwargs)
        self.by_a = by_a

    def configure_train(self, server_round, arrays, config, grid):
        config["lr"] = 0.05 * self.by_a ** (server_round - 1)
        return super().configure_train(server_round, arrays, config, grid)

METHOD = Method("fall", "mine:Fall", settings=FallSettings)
'''
)


@pytest.mark.parametrize("key", ["by-a", "by_a"])
def test_settings_come_through_strategy_args_to_the_constructor(install, run, rates, key):
    install("mine", SETTINGS, fall="mine:METHOD")
    run(strategy="fall", strategy_args={key: 0.5, "fraction_train": 1.0}, broken=rates)
    assert rates.told == pytest.approx([0.05] * 3 + [0.025] * 3)


def test_settings_have_a_table_among_those_of_the_run(install):
    install("mine", SETTINGS, fall="mine:METHOD")
    settings = RunSettings.from_run_config({"fall.by-a": 0.5})
    assert settings.of_method(find_method("fall")).by_a == 0.5
    with pytest.raises(SettingsError, match="by-a = 2"):
        RunSettings.from_run_config({"fall.by-a": 2.0})


HANDLER = (
    STRATEGY
    + '''
from dataclasses import replace
from flwr.app import Message, MetricRecord, RecordDict
from flwr_distill.protocol.method import TRAIN_PHASE, Method, Phase
from flwr_distill.protocol.schema import Reply, Request, TrainRequest
from flwr_distill.task.settings import Block

class Answer(Block):
    """The answer."""
    answer: int

def ask(message, context):
    return Message(RecordDict({"metrics": MetricRecord({"answer": ANSWER})}), reply_to=message)

ANSWER = 42

class Asking(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        nodes = list(grid.get_node_ids())
        replies = grid.send_and_receive([Message(RecordDict(), n, "query.ask") for n in nodes])
        metrics = [r.content["metrics"] for r in replies if r.has_content()]
        self.answers = [m["answer"] for m in metrics]
        config["answers"] = self.answers
        return super().configure_train(server_round, arrays, config, grid)

PHASE = Phase("query.ask", "nodes answer", (Reply(metrics=Answer),), "mine:ask")

class AskedRequest(TrainRequest):
    """Config of a train message, with a key of its own."""
    answers: tuple[int, ...] = ()

TRAIN = replace(TRAIN_PHASE, request=Request({"config": AskedRequest}, ("arrays",)))
METHOD = Method("asking", "mine:Asking", phases=(PHASE, TRAIN))
'''
)


def answers(sent):
    return [list(m.content.config_records["config"]["answers"]) for m in sent("train")]


def test_a_message_type_of_its_own_reaches_its_handler_and_its_replies_the_strategy(
    install, run, sent
):
    install("mine", HANDLER, asking="mine:METHOD")
    folder = run(strategy="asking", num_rounds=1)
    assert answers(sent) == [[42, 42, 42]] * 3
    assert "nodes answer" in (folder / "report.html").read_text()
    assert phases_of(find_method("asking"))["query.ask"].title == "nodes answer"


def test_a_key_in_train_messages_that_its_phase_does_not_declare_is_refused(install, run, sent):
    install(
        "mine", HANDLER.replace("phases=(PHASE, TRAIN)", "phases=(PHASE,)"), asking="mine:METHOD"
    )
    with pytest.raises(SettingsError, match="'answers'"):
        run(strategy="asking", num_rounds=1)
    assert sent("train") == []


def required(sent):
    """What nodes were asked to have, as they were asked who they are."""
    return [dict(m.content.config_records.get("config", {})) for m in sent("query.describe")]


def test_nodes_are_asked_whether_they_have_the_package_that_brings_their_code(install, run, sent):
    install("mine", HANDLER, asking="mine:METHOD")
    run(strategy="asking", num_rounds=1)
    assert (
        required(sent) == [{"method": "asking", "package": "someones==1.0", "settings": "{}"}] * 3
    )


def test_a_strategy_that_runs_no_code_on_nodes_is_not_asked_of_them(install, run, sent):
    install("mine", STRATEGY, decay="mine:Decay")
    run(strategy="decay", num_rounds=1)
    assert required(sent) == [{}] * 3


def test_replies_that_its_schema_refuses_never_reach_the_strategy(install, run, sent):
    install("mine", HANDLER.replace("ANSWER = 42", "ANSWER = 4.2"), asking="mine:METHOD")
    folder = run(strategy="asking", num_rounds=1)
    assert answers(sent) == [[]] * 3
    assert "answer" in (folder / "journal.jsonl").read_text()


TERM = (
    STRATEGY
    + '''
from flwr_distill.client.terms import LossTerm
from flwr.app import ConfigRecord
from flwr_distill.protocol.method import Method, all_protected

class Calm(LossTerm):
    """Keeps logits small."""
    mixes = "sample"
    made = 0

    def __init__(self, weight):
        self.weight = weight
        Calm.made += 1

    @classmethod
    def of(cls, session, content, model, settings):
        return cls(content.config_records["calm"]["weight"])

    def __call__(self, inputs, labels, logits):
        return self.weight * logits.square().mean()

class Calming(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        for message in super().configure_train(server_round, arrays, config, grid):
            message.content["calm"] = ConfigRecord({"weight": 0.1})
            yield message

METHOD = Method("calm", "mine:Calming", terms={"calm": "mine:Calm"}PROTECTED)
'''
)


def test_a_loss_term_is_made_by_the_record_that_asks_for_it(install, run):
    install("mine", TERM.replace("PROTECTED", ""), calm="mine:METHOD")
    run(strategy="calm", num_rounds=1)
    import mine

    assert mine.Calm.made == 3
    run(strategy="fedavg", num_rounds=1, run_id=8)
    assert mine.Calm.made == 3, "nobody asked for it"


def test_what_differential_privacy_covers_must_be_declared(install, run):
    install("mine", TERM.replace("PROTECTED", ""), calm="mine:METHOD")
    with pytest.raises(SettingsError, match="calm does not declare what"):
        run(strategy="calm", train__dp_noise=1.0)


def test_a_loss_term_over_single_samples_trains_with_differential_privacy(install, run, rows):
    install("mine", TERM.replace("PROTECTED", ", unprotected=all_protected"), calm="mine:METHOD")
    folder = run(strategy="calm", train__dp_noise=1.0, num_rounds=1)
    assert len(rows(folder)) == 2


THINGS = """
import numpy as np
import torch
from torch import nn
from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.protocol.method import Method
from flwr_distill.task.datasets import Dataset, DataSpec, RawSamples

class Wide(nn.Sequential):
    def __init__(self, spec):
        channels, height, width = spec.shape
        super().__init__(nn.Flatten(), nn.Linear(channels * height * width, spec.num_classes))

def halves(root, download):
    spec = DataSpec("halves", (1, 4, 4), 2, (0.5,), (0.5,))
    labels = np.arange(60) % 2
    images = np.zeros((60, 1, 4, 4), np.uint8)
    images[labels == 1] = 255
    samples = RawSamples(images, labels)
    return Dataset(spec, samples, samples)

def first_ones(images, labels, *, num_classes, per_class, init="noise", steps=None, generator,
               device="cpu", progress=None):
    present = labels.unique().repeat_interleave(per_class).cpu()
    made = torch.randn(len(present), *images.shape[1:], generator=generator)
    return VirtualData(made, present, method="first-ones", steps=0, seed=0, init=init)

METHOD = Method(
    "things",
    models={"wide": "mine:Wide"},
    datasets={"halves": "mine:halves"},
    distillers={"first-ones": "mine:first_ones"},
)
"""


def test_a_model_and_a_data_set_are_used_by_name_with_any_strategy(install, run, rows):
    install("mine", THINGS, things="mine:METHOD")
    folder = run(
        strategy="fedavg",
        model="wide",
        dataset="halves",
        partition__scheme="iid",
        train__lr=0.5,
        num_nodes=2,
    )
    assert rows(folder)[-1]["accuracy"] == 1.0
    assert type(create_model("wide", load_dataset("halves").spec)).__name__ == "Wide"


def test_a_distiller_is_used_by_name(install, run, sent):
    install("mine", THINGS, things="mine:METHOD")
    assert distiller("first-ones").__module__ == "mine"
    run(
        strategy="hfldd",
        hfldd__distiller="first-ones",
        hfldd__distilled_size=4,
        num_nodes=4,
        partition__classes=3,
        num_rounds=1,
    )
    assert sent("train.pool")


def test_a_package_may_bring_things_without_a_strategy(install):
    install("mine", THINGS, things="mine:METHOD")
    with pytest.raises(SettingsError, match="strategy = 'things': not one of agreement") as caught:
        find_strategy("things")
    assert "things," not in str(caught.value)


PANEL = (
    STRATEGY
    + """
from flwr_distill.protocol.method import Method
from flwr_distill.strategies.common.sections import Section

def note(run):
    return Section("A note", [f"It was {run.settings['strategy']}."])

def nothing(run):
    return None

METHOD = Method("noted", "mine:Decay", panels=("mine:note", "mine:nothing", "mine:lost"),
                formulas="mine:formulas")

def formulas(strategy, num_nodes, num_weights, num_rounds):
    return {"noted": 8.0 * num_nodes}
"""
)


def test_the_report_has_panels_and_formulas_and_names_a_panel_that_is_missing(install, run):
    install("mine", PANEL, noted="mine:METHOD")
    folder = run(strategy="noted", num_rounds=1)
    page = (folder / "report.html").read_text()
    assert all(text in page for text in ("A note", "It was noted.", "mine:lost", "Learning"))
    traffic = json.loads((folder / "traffic.json").read_text())
    assert traffic["formulas"]["noted"] == 3.0


def test_the_report_of_a_run_can_be_made_where_its_package_is_not_installed(install, run):
    from flwr_distill.server.page.method import panels
    from flwr_distill.server.page.run_files import read_run

    site = install("mine", PANEL, noted="mine:METHOD")
    folder = run(strategy="noted", num_rounds=1)
    (site / "someones-1.0.dist-info" / "entry_points.txt").unlink()
    installed_plugins.cache_clear()
    all_methods.cache_clear()
    assert panels(read_run(folder)) == []


def test_a_class_that_a_package_declares_too_stays_its_owners(install):
    from flwr_distill.strategies.moon.strategy import MOON

    source = (
        "from flwr_distill.protocol.method import Method\n"
        "METHOD = Method('my-moon', 'flwr_distill.strategies.moon.strategy:MOON')\n"
    )
    install("mine", source, my_moon="mine:METHOD")
    assert isinstance(find_method("my-moon"), Method)
    assert method_of(MOON).name == "moon"


READERS = '''
import json

import numpy as np
from flwr_distill.task.image_files import Picture, Stored
from flwr_distill.task.readers import DataReader, ImageReader, StoredImage, UnreadableImageError


class Raw(ImageReader):
    """Eight grey pixels behind a mark."""

    def recognises(self, file):
        return file.read(3) == b"RAW"

    def inspect(self, file):
        return Stored((2, 4), "RAW", (), is_grey=True)

    def read(self, file):
        content = file.read()[3:]
        if len(content) != 8:
            raise UnreadableImageError(f"has {len(content)} pixels, need 8")
        return Picture(np.frombuffer(content, np.uint8).reshape(1, 2, 4), self.inspect(file))


class Index(DataReader):
    """A JSON file: name of an image to its class."""

    title = "an index"

    def recognises(self, path):
        return path.name == "index.json"

    def classes(self, path):
        return sorted(set(json.loads(path.read_text()).values()))

    def images(self, path):
        for name, label in json.loads(path.read_text()).items():
            yield StoredImage(name, label, path.parent / name)


RAW, INDEX = Raw(), Index()
'''


@pytest.fixture
def index(tmp_path):
    """Four images of a format of a package's own, in two classes, and a damaged one."""
    folder = tmp_path / "own"
    folder.mkdir()
    labels = {}
    for number in range(4):
        (folder / f"{number}.raw").write_bytes(b"RAW" + bytes(range(number, 8 + number)))
        labels[f"{number}.raw"] = "ab"[number % 2]
    (folder / "cut.raw").write_bytes(b"RAW")
    (folder / "index.json").write_text(json.dumps({**labels, "cut.raw": "a"}))
    return folder / "index.json"


def test_a_reader_of_images_is_found_by_every_command(install, index, caplog):
    spec = DataSpec("own", (1, 2, 4), 2, (0.0,), (1.0,))
    with pytest.raises(DatasetError):
        load_private_data(index, spec)
    install("mine", READERS, readers={"raw": "mine:RAW", "index": "mine:INDEX"})
    raw = load_private_data(index, spec)
    assert raw.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert raw.labels.tolist() == [0, 1, 0, 1]
    assert "cut.raw: has 0 pixels, need 8" in caplog.text
    assert class_names(index) == ("a", "b")
    assert survey(index).counts == {"a": 2, "b": 2}
    assert load_source(str(index), data_root=None, shape=None, seed=0).class_names == ("a", "b")
    assert read_image(index.with_name("3.raw"), spec)[0, 0, 0] == 3


def test_names_of_a_reader_are_one_class_in_whatever_form_their_accents_are(install, index):
    apart, joined = (unicodedata.normalize(form, "grün") for form in ("NFD", "NFC"))
    labels = {"0.raw": apart, "1.raw": "rot", "2.raw": joined, "3.raw": apart}
    index.write_text(json.dumps(labels))
    install("mine", READERS, readers={"raw": "mine:RAW", "index": "mine:INDEX"})
    named = LabelMap((joined, "rot"))
    spec = DataSpec("own", (1, 2, 4), 2, (0.0,), (1.0,), labels=named)
    assert class_names(index) == named.classes
    assert load_private_data(index, spec).labels.tolist() == [0, 1, 0, 0]
    assert survey(index).counts == {joined: 3, "rot": 1}
