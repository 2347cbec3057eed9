"""Text and files: what every room may import."""
