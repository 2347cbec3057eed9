"""The pages' sequences of commands, typed as they stand there, with real processes.

The tutorials are typed from their first command to their last, and so is "Without Docker"; of
README, docs/start.md and docs/recovery.md the commands that need a federation. Hosts, ports, and
numbers of nodes and rounds are those of a small machine.
What stays running, or takes minutes, is left once it has said the words in `UNTIL`.
"""

import csv
import re
import shutil

import pytest

from flwr_distill.fleet.local_federation import free_ports
from tests.environments import project_files, shared_environment

from .pages import ROOT, commands, files
from .reader import Reader

TUTORIAL = ROOT / "docs" / "tutorial.md"
TABLES = ROOT / "docs" / "tutorial-tables.md"
DEPLOY = ROOT / "docs" / "deploy.md"
IN_ORDER = {
    "README.md": [
        "make demo",
        "source .venv/bin/activate",
        "flwr-distill up --nodes 10",
    ],
    "docs/start.md": [
        "source .venv/bin/activate",
        "flwr-distill up --nodes 10",
        "flwr-distill run -c 'strategy=\"fedprox\" num-rounds=50'",
        "flwr-distill status",
        "flwr-distill stop latest",
    ],
    "docs/recovery.md": [
        "flwr-distill run -c 'strategy=\"hfldd\" num-rounds=50'",
        'flwr-distill run -c \'strategy="hfldd" num-rounds=50 resume="latest"\'',
    ],
    "docs/tutorial.md": [command.text for command in commands(TUTORIAL) if command.fenced],
    "docs/tutorial-tables.md": [command.text for command in commands(TABLES) if command.fenced],
}
"""What is typed here, by page; tests/docs/test_commands.py has the rest."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def clone(tmp_path):
    """A fresh clone: what is in git, and the environment that `make setup` leaves."""
    folder = tmp_path / "flwr-distill"
    for file in project_files():
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    shared_environment(folder / ".venv", editable=True)
    (folder / ".venv" / ".ready").touch()
    return folder


@pytest.fixture
def reader(clone):
    """Types into the clone."""
    typing = Reader(clone)
    yield typing
    typing.close()


def type_tutorial(reader, page, folder, rounds):
    """Save the files of a tutorial, and type its commands; return what each said.

    So many rounds are enough to predict.
    """
    for name, content in files(page).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content.replace("num-rounds = 10", f"num-rounds = {rounds}"))
    output = {}
    for text in IN_ORDER[f"docs/{page.name}"]:
        until = "online. In another terminal" if text.startswith("flwr-distill up") else None
        output[text] = reader.type(text, until=until)
    return output


def test_the_tutorial_leads_from_nothing_to_a_prediction(reader, clone):
    output = type_tutorial(reader, TUTORIAL, clone / "tutorial", rounds=6)
    (prediction,) = (lines for text, lines in output.items() if " predict " in text)
    rows = [line for line in prediction.splitlines() if "new/three/" in line]
    new = clone / "tutorial" / "new" / "three"
    assert len(rows) == len(list(new.iterdir()))
    assert sum("three" in line.split("%")[0].partition(".png")[2] for line in rows) > len(rows) / 2


def test_the_tutorial_for_tables_leads_from_nothing_to_a_prediction(reader, clone):
    output = type_tutorial(reader, TABLES, clone / "tables", rounds=3)
    (prediction,) = (lines for text, lines in output.items() if " predict " in text)
    with open(clone / "tables" / "new.csv") as file:
        diseases = [row["disease"] for row in csv.DictReader(file)]
    rows = [line.partition("%")[0] for line in prediction.splitlines() if "new.csv, row" in line]
    assert len(rows) == len(diseases)
    right = [disease in row for disease, row in zip(diseases, rows, strict=True)]
    assert sum(right) > 0.6 * len(right)


def test_a_federation_of_the_readme_runs_is_stopped_and_resumes(reader):
    reader.env |= {"NODES": "2", "ROUNDS": "1"}  # what `make demo` takes from the environment
    demo, *start = IN_ORDER["README.md"]
    source, up, run, status, stop = IN_ORDER["docs/start.md"]
    assert start == [source, up]
    first, resumed = IN_ORDER["docs/recovery.md"]
    assert "hfldd" in reader.type(demo)
    reader.type(source)
    reader.type(up.replace("10", "3"), until="online. In another terminal")
    reader.type(run, until="round   1/50")
    assert "online" in reader.type(status)
    assert "is stopped" in reader.type(stop)
    reader.type(first, until="round   2/50")
    reader.type(stop)
    output = reader.type(resumed, until="/50  ")
    assert "round   1/50" not in output


def test_a_federation_without_docker_is_made_by_the_commands_of_its_section(reader):
    lines = DEPLOY.read_text().splitlines()
    start = lines.index("## Without Docker")
    end = next(i for i, line in enumerate(lines) if i > start and line.startswith("## "))
    typed = [each.text for each in commands(DEPLOY) if each.fenced and start < each.line < end]
    ports = dict(zip(("9091", "9092", "9093", "9200"), map(str, free_ports(4)), strict=True))
    here = {"fl.example.org": "localhost", "ward-3.example.org": "localhost", **ports}
    here["num-rounds=20"] = "num-rounds=1"
    stays = {"superlink": "Starting Fleet API", "node": "Mailbox: listening"}
    reader.type("source .venv/bin/activate")
    output = ""
    for text in typed:
        for name, other in here.items():
            text = text.replace(name, other)
        if key := re.search(r"SHA256:[\w+/]{20,}", output):
            text = text.replace("SHA256:...", key[0])
        output = reader.type(text, until=stays.get(text.split()[1]))
    assert re.search(r"hfldd .* %", output)
