"""Metrics, traces, request statistics and recorded schedules: what is said about requests, never
what happens to them.
"""
