"""Choosing a token of a row of scores; `rows.py` is the way in.

A row is worked on in chunks of 128 scores. It is read, and written only to mask tokens: by a
grammar, and by a truncation that the best candidates do not decide. Whoever reads scores makes them
relative to the best one, sharpens them by the temperature, and masks what is below the floor
(`scores.relative`). So a token's *cost*, minus its score, is never negative, and its *weight*
e^score at most 1.
"""
