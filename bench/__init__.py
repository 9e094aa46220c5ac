"""Benchmarks: each prints a table, writes JSON, and compares with a peer or a floor in one run.

A room per subject. `python -m bench.ROOM` measures what the room is about, `python -m
bench.ROOM.FILE` something beside it; docs/benchmarks/README.md lists them all. `harness/` is shared
by all rooms, `machine/` has the floors and `peers/` the servers of others.
"""
