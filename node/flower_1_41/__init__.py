"""What a node's processes use of Flower 1.41 alone: HTTP between SuperNode and executor."""
