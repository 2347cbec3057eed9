"""For the fleet: the SuperLink, the client of its Control API, and its clock."""
