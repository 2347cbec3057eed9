"""A data set's account under other names; secrets and folders that others could know or make."""

import hashlib
import hmac
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from flwr_distill.node.account import DataSet, LifetimeAccount
from flwr_distill.node.policy import OPEN, Policy
from flwr_distill.protocol.meeting import DESCRIBE, Requirement
from flwr_distill.storage.store import SECRET, NodeStore
from flwr_distill.task.errors import SettingsError
from tests.errors import at

from .site import Site


@pytest.fixture
def account(tmp_path: Path) -> LifetimeAccount:
    return LifetimeAccount(tmp_path / "lifetime-epsilon.json")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "ward-3"
    for label in "01":
        (folder / label).mkdir(parents=True)
        (folder / label / "a.png").write_bytes(b"image " + label.encode())
    return folder


def file_of(folder: Path) -> Path:
    file = folder.parent / "ward-3.npz"
    file.write_bytes(b"images")
    return file


def symlink(path: Path) -> Path:
    link = path.with_name("link")
    link.symlink_to(path)
    return link


def renamed(path: Path) -> Path:
    return path.rename(path.with_name("renamed"))


def copied(path: Path) -> Path:
    copy = path.with_name("copy")
    return Path(shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy))


def other_spelling(path: Path) -> Path:
    return path.parent / "." / path.parent.name / ".." / ".." / path.parent.name / path.name


def hard_link(path: Path) -> Path:
    other = path.with_name("other")
    os.link(path, other)
    return other


WAYS = [symlink, renamed, copied, other_spelling]


def spend(account: LifetimeAccount, path: Path, run: str, epsilon: float) -> float:
    """Book a run on the data at a path; what has left on it then."""
    name = account.name_of(DataSet.at(path))
    account.book(name, run, epsilon)
    return account.left(account.name_of(DataSet.at(path)))


@pytest.mark.parametrize("another", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_one_data_set_has_one_account_under_any_name(
    account: LifetimeAccount, images: Path, another, kind: str
) -> None:
    data = images if kind == "folder" else file_of(images)
    assert spend(account, data, "1", 2.0) == 2.0
    assert spend(account, another(data), "2", 3.0) == 5.0


def test_nor_has_a_hard_link_or_a_file_that_grows(account: LifetimeAccount, images: Path) -> None:
    data = file_of(images)
    spend(account, data, "1", 2.0)
    other = hard_link(data)
    with other.open("ab") as file:
        file.write(b" and more")
    assert spend(account, other, "2", 3.0) == 5.0


def test_another_data_set_has_an_account_of_its_own(account: LifetimeAccount, images: Path) -> None:
    spend(account, images, "1", 2.0)
    other = copied(images)
    (other / "1" / "a.png").write_bytes(b"other 1")  # as long as before
    assert spend(account, other, "2", 3.0) == 3.0


def test_evaluations_are_counted_under_any_name(account: LifetimeAccount, images: Path) -> None:
    account.book_evaluation(account.name_of(DataSet.at(images)), 0.1)
    name = account.name_of(DataSet.at(copied(images)))
    account.book_evaluation(name, 0.1)
    assert account.evaluations(name) == 2
    assert account.left(name) == pytest.approx(0.2)


def test_an_account_of_another_format_is_refused(
    account: LifetimeAccount, images: Path, tmp_path: Path
) -> None:
    spend(account, images, "1", 2.0)
    file = tmp_path / "lifetime-epsilon.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "format": "flwr-distill/lifetime-epsilon/1"}))
    with pytest.raises(SettingsError, check=at(file)) as error:
        account.name_of(DataSet.at(images))
    assert error.value.remedy


def test_a_node_that_is_started_with_its_data_under_another_name_has_spent_its_epsilon(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, Policy(most_epsilon=8.0, least_noise=0.5))
    site.run(strategy="fedavg", train__dp_noise=1.0)
    site.guard._account.book(site.guard._account.name_of(DataSet.at(site.file)), "1", 9.0)
    for another in (copied, renamed):
        site.node_config["data"] = str(another(site.file))
        site.start(Policy(most_epsilon=8.0, least_noise=0.5))
        answer = site.ask("train", RecordDict({"arrays": ArrayRecord()}))
        assert "most-epsilon" in answer.error.reason


def shown(site: Site, **requirement: str) -> dict[str, bytes]:
    """Secrets that a node shows when it is met."""
    request = ConfigRecord(Requirement(**requirement).model_dump(by_alias=True))
    answer = site.ask(DESCRIBE, RecordDict({"config": request}))
    return {k: v for k, v in answer.content["config"].items() if k.endswith("secret")}


def test_a_nodes_secret_is_another_in_each_run_and_its_own_is_never_sent(tmp_path: Path) -> None:
    site = Site(tmp_path, OPEN)
    site.run(strategy="fedavg")
    in_run_7 = shown(site)["secret"]
    resumed = shown(site, resumes="6")
    own = (site.state_dir / SECRET).read_bytes()

    def of(run: int) -> bytes:
        return hmac.new(own, b"place %d" % run, hashlib.sha256).digest()[:16]

    assert (in_run_7, resumed) == (of(7), {"secret": of(7), "resumed-secret": of(6)})
    assert len({own, of(6), of(7)}) == 3


def test_an_app_cannot_send_the_secret_that_all_runs_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, Policy(replies="declared"))
    site.run(strategy="fedavg")
    monkeypatch.setattr(
        "flwr_distill.client.app.place_secrets", lambda store, _: {"secret": store.secret()}
    )
    answer = site.ask(DESCRIBE, RecordDict())
    assert "the app's reply is not what strategy" in answer.content["config"]["missing"][0]


def test_a_temporary_state_directory_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("FLWR_DISTILL_STATE", raising=False)
    folder, elsewhere = tmp_path / f"flwr-distill-{os.getuid()}", tmp_path / "elsewhere"
    NodeStore.open(None, 1, 2)
    assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
    folder.chmod(0o755)
    NodeStore.open(None, 1, 2)
    assert stat.S_IMODE(folder.lstat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(SettingsError, match="other users can write"):
        NodeStore.open(None, 1, 2)
    folder.rmdir()
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(SettingsError, match="not a folder of this user"):
        NodeStore.open(None, 1, 2)
    folder.unlink()
    folder.mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SettingsError, match="not a folder of this user"):
        NodeStore.open(None, 1, 2)
