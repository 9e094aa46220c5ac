"""The engine: one task that takes requests, schedules them, and hands their tokens to streams; and
the link to the shard.
"""
