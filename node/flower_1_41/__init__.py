"""What a node's processes use of Flower 1.41 and 1.42 alone: HTTP from executor to SuperNode."""
