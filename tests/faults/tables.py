"""Tables of faults in docs/recovery.md, each between two marks."""

import os
from pathlib import Path

RECOVERY = Path(__file__).resolve().parents[2] / "docs" / "recovery.md"


def write(mark, head, order, rows):
    """Put rows, by fault, in place of their old ones, if CAUSES_TABLE is set."""
    if "CAUSES_TABLE" not in os.environ:
        return
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
    before, _, rest = RECOVERY.read_text().partition(begin)
    old, _, after = rest.partition(end)
    known = {row.split(" | ")[0].removeprefix("| "): row for row in old.splitlines()[2:]} | rows
    lines = [known[fault] for fault in order if fault in known]
    RECOVERY.write_text(before + begin + head + "\n".join([*lines, ""]) + end + after)
