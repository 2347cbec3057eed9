"""Everything that only a GPU can show, in one command and eight minutes: ``make gpu``."""
