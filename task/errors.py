"""Errors of data and models, in a module without torch: a node's supervisor reports them too."""


class DatasetError(ValueError):
    """Data is missing, unreadable or unusable; the message gives the remedy."""


class ModelError(ValueError):
    """A model is unknown or does not fit the data; the message says which do."""
