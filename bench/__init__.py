"""Benchmarks: `python -m bench` runs them and writes the results to bench/results."""
