"""What README and docs tell a reader to type: commands, and files to save."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
SHELLS = {"console", "bash", "sh"}
PROGRAMS = {
    *("docker", "flwr", "flwr-distill", "make", "pip", "python", "ssh", "scp"),
    *("tensorboard", "uv"),
}
_ASSIGNMENT = re.compile(r"\w+=\S* ")


@dataclass(frozen=True)
class Command:
    """A command as it stands in a page, with continued lines joined, without its comment."""

    page: str
    line: int
    text: str
    fenced: bool

    @property
    def argv(self):
        """Program and arguments, without assignments before them."""
        words = shlex.split(self.text)
        while words and re.fullmatch(r"\w+=.*", words[0], re.S):
            words.pop(0)
        return words

    def __str__(self):
        return f"{self.page}:{self.line}: {self.text}"


def commands(page):
    """Commands of a page in their order: of shell blocks, and those with arguments in its text.

    A program that a text names without arguments (`flwr-distill`) is a name, not a command.
    """
    name = str(page.relative_to(ROOT))
    for token in _tokens(page):
        first = token.map[0] + 1 if token.map else 0
        if token.type == "fence":
            lines = token.content.replace("\\\n", " ").splitlines()
            is_shell = token.info in SHELLS or (not token.info and _is_command(lines[0]))
            for line in lines if is_shell else ():
                if text := re.sub(r"(^|\s)#\s.*$", "", line).strip():
                    yield Command(name, first, re.sub(r" {2,}", " ", text), True)
        for child in token.children or ():
            if child.type == "code_inline" and _is_command(child.content):
                yield Command(name, first, child.content, False)


def files(page):
    """Files that a page has the reader save, by name: blocks whose first line is `# NAME`."""
    saved = {}
    for token in _tokens(page):
        head, _, _ = token.content.partition("\n")
        if token.type == "fence" and (match := re.fullmatch(r"# ([\w./-]+\.\w+)", head)):
            saved[match[1]] = token.content
    return saved


def spans(page, kind):
    """First line of each block of a kind, counted from 0, and the one after its last."""
    return [tuple(token.map) for token in _tokens(page) if token.type == kind]


def _tokens(page):
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def _is_command(text):
    program, _, arguments = re.sub(_ASSIGNMENT, "", text).partition(" ")
    return program in PROGRAMS and arguments != ""
