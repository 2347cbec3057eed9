"""Numbers in log lines, errors and pages."""


def counted(count: int, noun: str) -> str:
    """``1 node``, ``3 nodes``, ``1,200 nodes``; for nouns with a plural in -s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
