"""Choosing a token of a row of scores; `rows.py` is the way in.

A row is worked on in chunks of 64 scores, and stays in the second-level cache from the first pass
to the last. Its scores are made relative to its best one and divided by the temperature in place.
So a token's *cost*, minus its score, is never negative, and its *weight* e^score at most 1.
"""
