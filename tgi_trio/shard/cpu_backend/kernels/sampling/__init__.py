"""Choosing a token from a row of scores; `rows.py` is the entry.

A row is processed in chunks of 128 scores. It is only read, except to mask tokens: by a grammar,
and by truncation if the best candidates do not decide it. Whoever reads scores makes them relative
to the best one, divides them by the temperature, and masks those below the floor
(`scores.relative`). So a token's *cost*, minus its score, is never negative, and its *weight*,
e^score, is at most 1.
"""
