"""The `flwr-distill` command."""
