"""What the server uses of the private modules of Flower 1.32."""
