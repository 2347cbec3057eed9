"""What both sides of a federation say to each other."""
