"""Flower 1.32; modules that nodes, servers and SuperLinks share stand beside the folders."""
