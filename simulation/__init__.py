"""A federation on one machine: the real ServerApp, and the real ClientApp in worker processes."""
