"""What a node's processes use of Flower 1.32 alone: gRPC to SuperLink and executor, the policy."""
