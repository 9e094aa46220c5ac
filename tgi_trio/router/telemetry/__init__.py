"""Metrics, traces, request statistics and recorded schedules: they observe, and change nothing."""
