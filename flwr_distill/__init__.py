"""How the `flwr-distill` command starts, under a name that no other project has."""
