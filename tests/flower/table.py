"""Writes what `make test-flower` found on a Flower into the table of docs/flower.md."""

import sys
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flower.md"
BEGIN, END = "<!-- make test-flower writes this -->\n", "<!-- until here -->\n"
Column = dict[str, str]


def column(results: Path) -> Column:
    """What pytest found, as JUnit's XML, by the row that a test is about: ``yes``, or why not."""
    cells: dict[str, list[str]] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        for about in case.iter("property"):
            if about.get("name") == "deployment":
                cells.setdefault(str(about.get("value")), []).append(_cell(case))
    return {row: min(found, key=_weight) for row, found in cells.items()}


def _weight(cell: str) -> int:
    """A failure counts before a success, and that before what was skipped."""
    return ("no:", "yes", "not").index(cell[:3])


def _cell(case: ElementTree.Element) -> str:
    if (skipped := case.find("skipped")) is not None:
        return f"not tried: {skipped.get('message')}".replace("|", "/")
    failed = case.find("failure") is not None or case.find("error") is not None
    return f"no: `{case.get('name')}` fails" if failed else "yes"


def read(page: str) -> dict[str, Column]:
    """The columns of the page's table by version."""
    head, _, *rows = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    versions = _cells(head)[1:]
    table: dict[str, Column] = {version: {} for version in versions}
    for line in rows:
        name, *cells = _cells(line)
        for version, cell in zip(versions, cells, strict=True):
            table[version][name] = cell
    return table


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def written(page: str, table: dict[str, Column]) -> str:
    """The page with this table, the oldest version first."""
    versions = sorted(table, key=lambda version: [int(part) for part in version.split(".")])
    rows = sorted({row for column in table.values() for row in column})
    lines = [["", *versions], ["---"] * (len(versions) + 1)]
    lines += [[row, *(table[version].get(row, "") for version in versions)] for row in rows]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + text + END + rest.partition(END)[2]


def main() -> None:
    """Arguments: the version, and the file of pytest's results; rows that are not in it stay."""
    version, results = sys.argv[1], Path(sys.argv[2])
    page = PAGE.read_text(encoding="utf-8")
    table = read(page)
    table[version] = table.get(version, {}) | column(results)
    PAGE.write_text(written(page, table), encoding="utf-8")


if __name__ == "__main__":
    main()
