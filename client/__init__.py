"""The client side of a federation: the ClientApp, local training and the node."""
