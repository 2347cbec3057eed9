"""Of a node's processes: HTTP to the SuperNode."""
