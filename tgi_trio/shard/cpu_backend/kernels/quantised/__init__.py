"""Products with quantised weights as stored.

`multiplier.py` names the compile-time choices. `codes.py`, `dots.py` and `blocks.py` write the
instructions for a block. A linear layer calls one of the ways: `panels.py` (vectors),
`matrix.py`, `pairs.py` and `digits.py` (a matrix unit). `activations.py` quantises activations to
integers.
"""
