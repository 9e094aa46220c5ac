"""Products with quantised weights as stored.

`multiplier.py` names the compile-time choices. `codes.py`, `dots.py` and `blocks.py` write the
instructions for a block. `panels.py` is what a linear layer calls, and `activations.py` quantises
activations to integers.
"""
