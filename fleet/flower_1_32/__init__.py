"""What the fleet's tools use of the private modules of Flower 1.32, and of its Control API."""
