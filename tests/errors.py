"""What tests say of an error: its fields, never its sentence."""


def at(where, **fields):
    """Check of `pytest.raises`: the error names this place, and has these fields.

    As in ``pytest.raises(SettingsError, check=at("partition.alpha", value=-1))``.
    """

    def check(error):
        found = {name: getattr(error, name) for name in fields}
        assert (error.where, found) == (str(where), fields), error
        return True

    return check
