"""flwr-distill's own name: how the command starts, and where its packages are."""
