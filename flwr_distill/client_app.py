"""The ClientApp, by the name that an app's ``pyproject.toml`` gives it.

It lies in the package's own folder, unlike `flwr_distill.client.app`: in a simulation one thread of
Flower's looks for the ClientApp while another one is just importing the package.
"""

from flwr_distill.client.app import app

__all__ = ["app"]
