"""A bundle's settings in Flower's tables of ``pyproject.toml``, read within bounds."""

from __future__ import annotations

from typing import Any

from flwr.common.config import flatten_dict, fuse_dicts, validate_config

from flwr_distill.node.bundle import BundleError, settings_of

_MALFORMED = (ValueError, TypeError, AttributeError, KeyError, RecursionError)
"""What Flower's functions raise for malformed settings."""


def app_config(content: bytes) -> dict[str, Any]:
    """Read and check a bundle's settings, as `flwr.common.config.get_fab_config` does.

    Raises `BundleError` if the bundle exceeds a bound or is malformed.
    """
    settings = settings_of(content)
    try:
        is_valid, errors, _ = validate_config(settings, check_module=False)
    except _MALFORMED as error:
        raise BundleError(f"its settings are malformed ({type(error).__name__})") from None
    if not is_valid:
        raise BundleError("; ".join(errors)[:300])
    return settings


def run_config_of(content: bytes, overrides: dict[str, Any]) -> dict[str, Any]:
    """The run config of a bundle, with a run's own values; raises as `app_config`."""
    defaults = app_config(content)["tool"]["flwr"]["app"].get("config", {})
    try:
        return fuse_dicts(flatten_dict(defaults), overrides)
    except _MALFORMED as error:
        raise BundleError(str(error)[:300] or type(error).__name__) from None
