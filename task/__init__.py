"""What servers and clients share: datasets, partitions, models and record names."""
