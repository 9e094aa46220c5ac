"""What the kernels of recurrences share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def soften(x):
    """Return the softplus of float32 numbers; that of a large number is the number.

    Near zero, what is lost in a sum with one is made up for, so that small time steps are precise.
    """
    small = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + small
    kept = tl.where(more == 1.0, 1.0, more - 1.0)  # of the small number, in the sum
    logarithm = tl.where(more == 1.0, small, tl.log(more) * (small / kept))
    return tl.where(x > 20.0, x, logarithm)


@triton.jit
def chain(decay, entered, next_decay, next_entered):
    """Return what two tokens after each other do to a state: decay it, then add to it."""
    return decay * next_decay, entered * next_decay + next_entered
