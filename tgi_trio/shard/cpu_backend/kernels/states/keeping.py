"""The entry to operations of mixers with recurrent states; see `linked_calls.py`.

A row reads its state from one slot and writes it to another, so a step can be computed again. Rows
are computed token by token, so results are the same to the bit wherever a sequence's chunks end.
"""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import entry
from tgi_trio.shard.cpu_backend.kernels.linked_calls import mixer_at, operation_at, step_at
from tgi_trio.shard.cpu_backend.kernels.states.channels import keep_channels
from tgi_trio.shard.cpu_backend.kernels.states.convolution import convolve
from tgi_trio.shard.cpu_backend.kernels.states.recurrence import recur
from tgi_trio.shard.cpu_backend.tables import Code

CONVOLVE, RECUR = int(Code.CONVOLVE), int(Code.RECUR)


@entry
def keep_states(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation that reads and writes states."""
    step, op = step_at(step_address), operation_at(op_address)
    mixer = mixer_at(op.facts)
    if op.code == CONVOLVE:
        convolve(variant, rank, step, op, mixer, scratch)
    elif op.code == RECUR:
        recur(variant, rank, step, op, mixer, scratch)
    else:
        keep_channels(variant, rank, step, op, mixer)
