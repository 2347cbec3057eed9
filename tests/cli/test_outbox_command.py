"""The outbox log is whole, or says where it is not; so does the command that shows it."""

import datetime
import hashlib
import json
import os
import re
from typing import Any

import pytest
import torch
from PIL import Image

from flwr_distill.distill.virtual_data import VirtualData
from flwr_distill.node.outbox import FOLDER, Outbox, OutboxError, entries, log_file

from .commands import assert_refused, command

NOON = datetime.datetime(2026, 1, 5, 12, tzinfo=datetime.UTC)
LINE: dict[str, Any] = {
    "run": "7",
    "strategy": "hfldd",
    "type": "train.distill",
    "title": "members distil their data",
    "data": "/data/ward-3",
    "what": ["parcel: link, num-bytes, payload, token", "<script>"],
    "parcels": [{"to": "6", "purpose": "virtual-data", "link": "relay", "bytes": 9}],
    "virtual": [],
    "classes": [],
    "epsilon": 1.5,
    "lifetime": 2.25,
}


@pytest.fixture
def folder(tmp_path):
    """The outbox of a node, with three lines; the last is a refusal."""
    outbox = Outbox(tmp_path / FOLDER)
    outbox.append(NOON, 100, **LINE)
    outbox.append(NOON, 20, **LINE, **{"extra": "é"})
    error = {key: LINE[key] for key in ("run", "strategy", "type", "data")}
    outbox.append(NOON, 3, **error, error="raw-data: never")
    return tmp_path / FOLDER


def show(folder, *arguments):
    return command("outbox", "--state-dir", folder.parent, *arguments)


def test_a_log_goes_on_after_a_restart(folder):
    outbox = Outbox(folder)
    outbox.append(NOON, 4, **LINE)
    assert [line["bytes"] for line in entries(folder)] == [100, 20, 3, 4]
    assert outbox.bytes_of_a_day(NOON + datetime.timedelta(hours=23)) == 127
    assert outbox.bytes_of_a_day(NOON + datetime.timedelta(hours=24)) == 0


def rewritten(line, **changes):
    """A line with other values, and the hash that fits these."""
    entry = {key: value for key, value in (json.loads(line) | changes).items() if key != "hash"}
    digest = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
    return json.dumps({**entry, "hash": digest})


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda lines: [lines[0].replace("100", "101"), *lines[1:]], 1),
        (lambda lines: [lines[0], *lines[2:]], 2),
        (lambda lines: [lines[0], rewritten(lines[1], bytes=1), lines[2]], 3),
        (lambda lines: [lines[0], rewritten(lines[2], number=2)], 2),
        (lambda lines: [*lines[:2], rewritten(lines[2], number=9)], 3),
        (lambda lines: lines[1:], 1),
        (lambda lines: [lines[0], lines[0], *lines[1:]], 2),
        (lambda lines: [*lines, "[]"], 4),
        (lambda lines: [*lines, "[" * 100_000], 4),
    ],
)
def test_a_changed_log_is_found_out_at_the_line(change, line, folder):
    lines = log_file(folder).read_text().splitlines()
    log_file(folder).write_text("".join(f"{text}\n" for text in change(lines)))
    with pytest.raises(OutboxError, match=f"line {line}"):
        Outbox(folder)
    assert_refused(show(folder), f"line {line}")
    page = folder.parent / "page.html"
    assert show(folder, "--html", str(page)).exit_code == 1
    assert "This log was changed" in page.read_text()


def test_a_line_is_on_the_disk_before_what_it_tells_of_leaves(folder, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", lambda number: synced.append(os.fstat(number).st_size))
    Outbox(folder).append(NOON, 4, **LINE)
    assert synced == [log_file(folder).stat().st_size]


def test_a_line_that_a_power_cut_left_half_written_is_cut_off(folder):
    with log_file(folder).open("a") as file:
        file.write('{"number": 4, "ti')
    Outbox(folder).append(NOON, 4, **LINE)
    assert len(list(entries(folder))) == 4


def test_what_another_process_writes_meanwhile_is_noticed(folder):
    outbox = Outbox(folder)
    with log_file(folder).open("a") as file:
        file.write("\n")
    with pytest.raises(OutboxError, match="another process"):
        outbox.append(NOON, 4, **LINE)


def test_the_table_says_what_left_for_whom_and_the_hash_to_note(folder):
    output = show(folder).output
    last = json.loads(log_file(folder).read_text().splitlines()[-1])["hash"]
    for text in (
        "hfldd",
        "node 6, relay: virtual-data",
        "members distil their data",
        "1.5",
        "100 B",
        "raw-data: never",
        last,
    ):
        assert text in output
    assert show(folder / "nowhere" / FOLDER).exit_code == 1


def test_the_page_is_whole_in_itself_and_shows_the_virtual_images_that_left(folder):
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    virtual = VirtualData(images, torch.arange(4), "dm", 1, 0, "noise")
    outbox = Outbox(folder)
    name = outbox.keep(virtual.to_bytes())
    outbox.append(NOON, 4, **{**LINE, "virtual": [name, "0" * 64]})
    file = folder.parent / "page.html"
    assert show(folder, "--html", str(file)).exit_code == 0
    page = file.read_text()
    assert page.count('<img class="sheet"') == 1
    assert "4 images by dm, from noise" in page
    assert "1 file cannot be read" in page
    assert "epsilon on /data/ward-3" in page
    assert "<script>" not in page
    assert not re.findall(r'(?:src|href)="(?!data:)', page)


def test_virtual_images_are_headed_by_the_names_of_their_classes(folder, monkeypatch):
    shown: list[list[str]] = []

    def sheet(images, labels, class_names, formation):
        shown.append(list(class_names))
        return Image.new("RGB", (1, 1))

    monkeypatch.setattr("flwr_distill.distill.contact_sheet.contact_sheet", sheet)
    outbox = Outbox(folder)
    for classes in (["cat", "dog"], []):
        images = torch.rand(3, 1, 8, 8)
        name = outbox.keep(VirtualData(images, torch.arange(3), "dm", 1, 0, "noise").to_bytes())
        outbox.append(NOON, 4, **{**LINE, "virtual": [name], "classes": classes})
    assert show(folder, "--html", str(folder.parent / "page.html")).exit_code == 0
    assert shown == [["0", "1", "2"], ["cat", "dog", "2"]]  # the last to leave first


@pytest.mark.parametrize("key", ["classes", "virtual", "what", "run"])
def test_a_line_without_a_value_is_shown_as_damaged_and_those_before_it_stay(folder, key):
    outbox = Outbox(folder)
    outbox.append(NOON, 4, **{name: value for name, value in LINE.items() if name != key})
    file = folder.parent / "page.html"
    result = show(folder, "--html", str(file))
    assert result.exit_code == 1
    message = f"log.jsonl: line 4 has no {key}"
    assert message in result.stderr.replace("\n", " ")
    assert message in file.read_text()
    assert "raw-data: never" in file.read_text()


def test_the_page_decodes_no_virtual_images_beyond_a_bound(folder, monkeypatch):
    """Some KB that an app had sent took gigabytes of memory."""
    monkeypatch.setattr("flwr_distill.fleet.outbox_page.MAX_BYTES", 2**10)
    outbox = Outbox(folder)
    images = torch.zeros(4, 1, 32, 32)
    name = outbox.keep(VirtualData(images, torch.arange(4), "dm", 1, 0, "noise").to_bytes())
    outbox.append(NOON, 4, **{**LINE, "virtual": [name]})
    file = folder.parent / "page.html"
    assert show(folder, "--html", str(file)).exit_code == 0
    assert '<img class="sheet"' not in file.read_text()


def test_the_page_says_of_virtual_features_that_they_are_no_images(folder):
    vectors = torch.rand(4, 1280, 1, 1, generator=torch.Generator().manual_seed(0))
    outbox = Outbox(folder)
    name = outbox.keep(VirtualData(vectors, torch.arange(4), "dm", 1, 0, "noise").to_bytes())
    outbox.append(NOON, 4, **{**LINE, "virtual": [name]})
    file = folder.parent / "page.html"
    assert show(folder, "--html", str(file)).exit_code == 0
    page = file.read_text()
    assert "1 set of features cannot be shown as images" in page
    assert '<img class="sheet"' not in page


def test_an_empty_outbox_is_a_page_too(tmp_path):
    file = tmp_path / "page.html"
    assert show(tmp_path / FOLDER, "--html", str(file)).exit_code == 0
    assert "Nothing has left it." in file.read_text()


@pytest.mark.parametrize("name", ["standard", "open", "hospital"])
def test_policies_are_explained_in_words(name):
    result = command("policy", "check", name)
    assert result.exit_code == 0
    assert ("Never sends its samples" in result.output) == (name != "open")
    assert "Not enforced: any app bundle is run" in result.output
    assert_refused(command("policy", "check", "hospitl"), "one of standard, open, hospital")
