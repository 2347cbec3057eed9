"""The only room that imports Flower's private modules.

A folder for each line of Flower, such as `line_1_32`, has in it one for each room that it serves;
modules beside these folders fit all of these lines. Rooms below never import from here:
`server.line` and `node.stock` find what the installed Flower's line offers, by name.
"""
