"""Run ids, shortened to what tells them apart."""

from collections.abc import Sequence

LATEST = "latest"


class RunIdError(ValueError):
    """A text stands for no run, or for several."""


def full_id(text: str, ids: Sequence[str]) -> str:
    """Return the id that equals a text, or the only one that begins with it.

    ``latest`` is the last one.

    Raises
    ------
    RunIdError
        If there is none, or there are several.
    """
    if text in ids:
        return text
    if text == LATEST and ids:
        return ids[-1]
    matches = [each for each in ids if text and each.startswith(text)]
    if len(matches) > 1:
        shown = ", ".join(matches[:3]) + (" ..." if len(matches) > 3 else "")
        raise RunIdError(f"{text} begins {len(matches)} ids: {shown} (give more digits)")
    if not matches:
        raise RunIdError(f"no run {text}")
    return matches[0]
