"""Of the fleet's tools: the SuperLink, the client of its Control API, and its clock."""
