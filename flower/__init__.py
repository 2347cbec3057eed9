"""The only room that imports Flower's private modules.

A folder for each line of Flower, `line_1_32` and `line_1_41`, has in it one for each room that it
serves; modules beside these folders fit all of these lines. Rooms below never import from here:
`server.line` and `node.stock` find what the installed Flower's line offers, by name.
"""
