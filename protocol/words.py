"""Numbers in log lines and errors."""


def counted(count: int, noun: str) -> str:
    """``1 node``, ``3 nodes``; for nouns with a plural in -s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
