"""Methods that need images."""

from flwr_distill.task.datasets import DataSpec
from flwr_distill.task.errors import SettingsError


def require_images(spec: DataSpec, strategy: str) -> None:
    """Refuse other data.

    Raises
    ------
    SettingsError
        If the data are texts or tables; names the strategy and the remedy.
    """
    if spec.kind != "image":
        raise SettingsError(
            f"strategy = {strategy!r}: {spec.name!r} holds {spec.kind}s, which cannot be distilled "
            "(take another strategy)"
        )
