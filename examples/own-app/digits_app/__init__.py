"""An app as `flwr new` lays it out, with a strategy and handlers of flwr-distill."""
