"""A node's processes: SuperNode, executor, worker, with what all Flowers that have a folder share.

What differs from line to line stands in a folder for it: `flower_1_32`, `flower_1_41`.
"""
