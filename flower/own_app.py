"""Our own Flower app: its settings and presets are package data, its code is what is installed."""

from importlib.resources import files
from pathlib import Path

_DATA = Path(str(files("flwr_distill")))

APP_DIR = _DATA / "app"
"""Folder with the app's ``pyproject.toml``, as ``flwr run`` takes it where we are installed."""

PRESETS = _DATA / "presets"
"""Folder of the papers' settings: one TOML file each."""
