"""The client side of a federation: the ClientApp, local training and the node."""

if __name__ != "flwr_distill.client":  # in a checkout, whose folder is on Python's path
    raise ImportError(f"{__name__} would be a second copy (import flwr_distill.client)")
