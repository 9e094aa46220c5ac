"""Processes that do one job each for the router, within limits, and may die of it.

The limits are memory and time, for what strangers send must not take the server's; what such a
process may open or call is not limited.
"""
