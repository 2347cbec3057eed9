"""Which Flower the fleet's tools speak to."""

from importlib.metadata import version

LINE = "1.32."


def why_another() -> str:
    """Why these tools cannot speak to a SuperLink with the installed Flower; '' if they can."""
    if (installed := version("flwr")).startswith(LINE):
        return ""
    return (
        f"flwr {installed} is installed, and this needs {LINE}x: install flwr==1.32.1, or use "
        "Flower's own commands, such as `flwr run` (docs/flower.md)"
    )
