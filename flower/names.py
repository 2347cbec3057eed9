"""Names of Flower's that this project uses, and those that the installed Flower does not have.

``python -m flwr_distill.flower.names`` (``make flower-probe VERSION=1.43.0``)

Read from the source: imports, and attributes of what is imported. Of a line's folder
(`flower.lines`) those count if it serves the installed Flower; where none does, each is checked.
Exits with 1 if a name is missing, or no folder serves the installed Flower.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

import flwr_distill
from flwr_distill.flower.lines import FOLDERS, line

ROOT = Path(flwr_distill.__file__).parent
HERE = Path(__file__).parent


@dataclass(frozen=True, order=True)
class Use:
    """A name of Flower's, and where it is used.

    Parameters
    ----------
    module : str
        Such as ``flwr.supernode.start_client_internal``.
    path : str
        What is used of it, such as ``LinkState.store_message``; empty for the module itself.
    file : Path
        Where; the first of several places.
    """

    module: str
    path: str
    file: Path

    def __str__(self) -> str:
        return f"{self.module}:{self.path}" if self.path else self.module

    def problem(self) -> str:
        """Why the installed Flower does not have it; empty if it does."""
        try:
            found: object = import_module(self.module)
        except ImportError as error:
            return str(error)
        for name in self.path.split(".") if self.path else ():
            try:
                found = getattr(found, name)
            except AttributeError:
                return f"it has no {name}"
            except Exception:  # a property that needs a running federation
                return ""
        return ""


def uses_in(files: Iterable[Path]) -> list[Use]:
    """What files use of Flower, sorted by name, each once."""
    found: dict[str, Use] = {}
    for file in sorted(files):
        for use in _uses(ast.parse(file.read_text(encoding="utf-8")), file):
            found.setdefault(str(use), use)
    return sorted(found.values())


def _uses(tree: ast.AST, file: Path) -> Iterator[Use]:
    names: dict[str, Use] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_flowers(alias.name):
                    names[alias.asname or alias.name] = Use(alias.name, "", file)
        elif isinstance(node, ast.ImportFrom) and _is_flowers(node.module or ""):
            for alias in node.names:
                names[alias.asname or alias.name] = _imported(str(node.module), alias.name, file)
    yield from names.values()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if owner := names.get(node.value.id):
            path = ".".join(filter(None, (owner.path, node.attr)))
            yield Use(owner.module, path, file)


def _imported(module: str, name: str, file: Path) -> Use:
    """A name from a module, or a module from a package."""
    try:
        import_module(f"{module}.{name}")
    except ImportError:
        return Use(module, name, file)
    return Use(f"{module}.{name}", "", file)


def _is_flowers(module: str) -> bool:
    return module.partition(".")[0] == "flwr"


def files_for(folder: str) -> list[Path]:
    """Files of this project, without those of other lines' folders that this one does not use."""
    rooms = [ROOT / room for room in flwr_distill.ROOMS if (ROOT / room).is_dir()]
    rooms = rooms or [ROOT.parent / room for room in flwr_distill.ROOMS]
    lines = {HERE / each for each in FOLDERS.values()}
    shared = [file for room in rooms for file in room.rglob("*.py") if not lines & {*file.parents}]
    own = [*(HERE / folder).rglob("*.py")]
    for file in own:  # grows
        own += _from_other_lines(file) - {*own}
    return [*shared, *own]


def _from_other_lines(file: Path) -> set[Path]:
    """Files of lines' folders from which a file imports."""
    own = f"{__package__}."
    imported = [
        node.module or ""
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
    ]
    paths = [module.removeprefix(own).replace(".", "/") for module in imported]
    return {path for each in paths if (path := HERE / f"{each}.py").exists()}


def main() -> None:
    """Print the names that are missing, and exit."""
    console, installed = Console(), version("flwr")
    serving = FOLDERS.get(line())
    if serving is None:
        console.print(f"no folder serves flwr {installed}: what each would need", highlight=False)
    failed = serving is None
    for folder in [serving] if serving else sorted(set(FOLDERS.values())):
        uses = uses_in(files_for(folder))
        absent = [(use, problem) for use in uses if (problem := use.problem())]
        failed |= bool(absent)
        title = f"{folder}: {len(uses)} names of Flower's, {len(absent)} missing"
        table = Table("name", "why", "used in", title=title)
        for use, problem in absent:
            table.add_row(str(use), problem, str(use.file.relative_to(ROOT.parent)))
        console.print(table if absent else title, highlight=False)
    sys.exit(failed)


if __name__ == "__main__":
    main()
