"""Benchmarks: `python -m bench` runs them and writes what it measured to bench/results."""
