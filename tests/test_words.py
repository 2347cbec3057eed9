"""Words that engineers do not search for stand nowhere; docs/glossary.md has those that do."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BANNED = {
    r"mend(s|ed|ing)?": "fix",
    r"come again": "retry later",
    r"sets? aside": "reject",
    r"box(es|ed)? in|the box|a box": "sandbox",
    r"lack(s|ed|ing)?": "missing",
    r"looks? for messages": "poll",
    r"(go|goes|went) on(?! our handlers)": "continue",
}
"""Patterns and what to write instead."""
KINDS = {".py", ".md", ".toml", ".yaml", ".yml"}
EXCEPT = {"CHANGELOG.md", "tests/test_words.py"}
"""The changelog says what was said at the time."""


def test_no_file_has_a_banned_word():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [name for name in listed.stdout.splitlines() if Path(name).suffix in KINDS]
    assert len(files) > 500
    banned = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in BANNED), re.IGNORECASE)
    findings = [
        f"{name}:{number}: {line.strip()}"
        for name in files
        if name not in EXCEPT and (ROOT / name).exists()
        for number, line in enumerate((ROOT / name).read_text("utf-8").splitlines(), 1)
        if banned.search(line)
    ]
    assert not findings, f"banned words, for which there are {BANNED}:\n" + "\n".join(findings)
