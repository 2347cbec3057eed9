"""Results that were looked at once and must not change unseen.

Run with ``APPROVE=1`` to approve what comes out now, and read the difference before it is
committed: a change here is one that users see.
"""

import json
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "approved"


def rounded(value):
    """Numbers with six digits, so that the file can be read."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


def close(value):
    """Floats are compared with a tolerance: processors round differently."""
    if isinstance(value, float):
        return pytest.approx(value, rel=1e-3, abs=1e-5)
    if isinstance(value, dict):
        return {key: close(part) for key, part in value.items()}
    return [close(part) for part in value] if isinstance(value, list) else value


@pytest.fixture
def same_text():
    def check(name, text):
        file = FOLDER / name
        if os.environ.get("APPROVE"):
            file.write_text(text)
        assert text.splitlines() == file.read_text().splitlines(), f"{name} is another now"

    return check


@pytest.fixture
def same_numbers():
    def check(name, key, value):
        """Compare with what the file ``name`` has under ``key``."""
        file = FOLDER / f"{name}.json"
        if os.environ.get("APPROVE"):
            table = json.loads(file.read_text()) if file.exists() else {}
            table[key] = rounded(value)
            lines = (f"  {json.dumps(k)}: {json.dumps(table[k])}" for k in sorted(table))
            file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        approved = json.loads(file.read_text())
        assert rounded(value) == close(approved[key])

    return check
