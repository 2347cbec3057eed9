"""A node's processes that use private modules of Flower 1.32: SuperNode, executor, worker."""
