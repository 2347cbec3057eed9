"""Words that engineers do not search for stand nowhere; docs/glossary.md has those that do."""

import re

from tests.environments import ROOT, project_files

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
    files = [file for file in project_files() if file.suffix in KINDS]
    assert len(files) > 500
    banned = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in BANNED), re.IGNORECASE)
    findings = [
        f"{name}:{number}: {line.strip()}"
        for file in files
        if (name := str(file.relative_to(ROOT))) not in EXCEPT
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if banned.search(line)
    ]
    assert not findings, f"banned words, for which there are {BANNED}:\n" + "\n".join(findings)
