"""Of a node's processes: gRPC to SuperLink and executor, and the transport of the guard."""
