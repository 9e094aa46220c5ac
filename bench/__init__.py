"""Benchmarks: each prints a table, writes JSON, and compares with a peer or a floor in one run."""
