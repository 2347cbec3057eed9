"""What server and nodes share: datasets, partitions, models and settings."""
