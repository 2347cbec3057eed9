"""HTML reports: one run, or several compared, each a single self-contained file."""
