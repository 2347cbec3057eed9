"""The error of data, in a module without torch: a node's supervisor reports it too."""


class DatasetError(ValueError):
    """Data is missing, unreadable or unusable; the message gives the remedy."""
