"""A rule in the forms that the CPU runs: plain, replayed, compiled."""
