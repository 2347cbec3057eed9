"""What is published: a wheel of our packages alone, its page on an index, its dependencies."""

import ast
import email
import re
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from io import BytesIO

import pytest
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flwr_distill import ROOMS
from flwr_distill.flower.bundle import app_bundle
from flwr_distill.flower.own_app import APP_DIR
from flwr_distill.server.settings_catalogue import packaged

from .conftest import ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]
OPTIONAL = (
    *("backbones", "dicom", "mlflow", "parquet", "partitions", "simulation", "tiff", "timm"),
    "wandb",
)
INDIRECT = {"click", "tensorboard"}
"""Needed by typer, in a version that fits it, and by torch.utils.tensorboard."""


@pytest.fixture(scope="module")
def page(wheel):
    """Markdown of the page that a package index shows."""
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(file))
    assert metadata["Description-Content-Type"] == "text/markdown"
    return metadata.get_payload()


def names(requirements):
    return {canonicalize_name(Requirement(each).name) for each in requirements}


def imported():
    """Third-party modules that our packages import, but for type checkers alone."""

    def walk(node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield child.module
                yield from (f"{child.module}.{alias.name}" for alias in child.names)
            yield from walk(child)

    ours = {*sys.stdlib_module_names, "flwr_distill"}
    for package in ("flwr_distill", *ROOMS):
        for file in (ROOT / package).rglob("*.py"):
            modules = walk(ast.parse(file.read_text()))
            yield from (name for name in modules if name.partition(".")[0] not in ours)


def test_every_package_that_is_imported_is_declared_and_the_other_way_round():
    extras = [each for name in OPTIONAL for each in PROJECT["optional-dependencies"][name]]
    declared = names(PROJECT["dependencies"])
    optional = names(extras) - declared
    owners = packages_distributions()
    modules = {name.partition(".")[0] for name in imported()} - {"google"}
    found = {canonicalize_name(owner) for name in modules for owner in owners[name]}
    assert "google.protobuf" in set(imported())
    found.add("protobuf")
    assert found - optional == declared - INDIRECT
    assert optional <= found


def test_dependencies_are_ranges_and_the_lock_is_within_them():
    lock = {
        canonicalize_name(each.name): each
        for each in map(Requirement, (ROOT / "requirements.lock").read_text().splitlines())
    }
    for each in map(Requirement, PROJECT["dependencies"]):
        assert {">=", "<", "!="} >= {part.operator for part in each.specifier}, each
        (locked,) = lock[canonicalize_name(each.name)].specifier
        assert each.specifier.contains(locked.version), each


def test_the_wheel_has_our_packages_alone_with_their_data_and_types(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    assert {name.partition("/")[0] for name in files if ".dist-info/" not in name} == {
        "flwr_distill"
    }
    modules = {name for name in files if name.endswith(".py")}
    assert {f"flwr_distill/{room}/__init__.py" for room in ROOMS} <= modules
    assert "flwr_distill/py.typed" in files
    data = ROOT / "flwr_distill"
    presets = {file.relative_to(ROOT).as_posix() for file in data.glob("presets/*.toml")}
    assert len(presets) > 10
    assert presets | {"flwr_distill/app/pyproject.toml"} <= set(files)


def test_the_sdist_builds_the_same_wheel(wheel, build, tmp_path):
    with tarfile.open(build("sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert build("wheel", source).read_bytes() == wheel.read_bytes()


def test_links_and_pictures_of_the_index_page_lead_somewhere(page):
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    inline = [child for token in tokens for child in token.children or ()]
    targets = [t.attrs.get("href", t.attrs.get("src")) for t in inline if t.attrs]
    assert "https://flower.ai" in targets
    assert [each for each in targets if not each.startswith("https://")] == []
    assert "mermaid" not in page
    for name in re.findall(r"\((docs/[^)]+)\)", page):
        assert (ROOT / name).exists(), name


def test_commands_and_code_of_the_index_page_are_the_readmes(page):
    def blocks(text):
        parsed = MarkdownIt("commonmark").parse(text)
        return [t.content for t in parsed if t.type == "fence" and t.info != "mermaid"]

    assert blocks(page) == blocks((ROOT / "README.md").read_text())


def test_the_packaged_app_is_the_projects_own():
    assert (APP_DIR / "pyproject.toml").read_text() == packaged(PYPROJECT), "run `make settings`"
    ours, theirs = (
        tomllib.loads(text)["tool"]["flwr"] for text in (packaged(PYPROJECT), PYPROJECT)
    )
    assert ours == theirs


def test_the_bundle_of_a_run_holds_our_modules_alone():
    with zipfile.ZipFile(BytesIO(app_bundle(APP_DIR))) as archive:
        files = set(archive.namelist())
    assert {name.partition("/")[0] for name in files} == {
        "flwr_distill",
        *ROOMS,
        "pyproject.toml",
        ".info",
    }
    assert {"server/app.py", "client/app.py", "flwr_distill/__init__.py"} <= files
