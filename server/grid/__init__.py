"""The grid of a run: fast polling, deadlines, byte ledger, spool, screening of replies."""
