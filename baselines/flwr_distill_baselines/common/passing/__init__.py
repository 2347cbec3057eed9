"""Groups of nodes that train one model after another: FedSeq, in both its forms."""
