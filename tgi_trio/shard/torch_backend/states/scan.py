"""A recurrence run over the rows of a step, whatever their lengths.

It is given as two functions that compute the same: one takes a token of every row at a time, the
other a chunk of tokens of some rows, by a few large products instead of many small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tgi_trio.shard.torch_backend.states.steps import StateSteps

Parts = Sequence[torch.Tensor]
# (parts [R, ...] each, states [R, ...]) -> (outputs [R, ...], states behind them)
Step = Callable[[Parts, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# The same of parts [R, L, ...], of which `there` [R, L] says which are tokens; others, behind a
# row's last, must leave its state as it is.
Chunk = Callable[[Parts, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def scan_rows(
    parts: Parts, states: torch.Tensor, steps: StateSteps, step: Step, chunk: Chunk, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a recurrence's outputs [T, ...] and the states [R, ...] behind the rows' last tokens.

    `parts` [T, ...] each: what it reads of the tokens; `states` [R, ...]: those before the rows'
    first tokens, which may be overwritten; `size`: the most tokens of a chunk.
    """
    if steps.decodes:
        return step(parts, states)
    cut = steps.chunks(size)
    outputs: torch.Tensor | None = None
    running = states.index_select(0, cut.rows)
    for turn in cut.turns:
        n = len(turn.places)
        made, behind = chunk([part[turn.places] for part in parts], turn.there, running[:n])
        running[:n] = behind
        if outputs is None:
            outputs = steps.new_outputs(made, made.shape[2:])
        outputs.index_copy_(0, turn.targets, made.flatten(0, 1).index_select(0, turn.own))
    states.index_copy_(0, cut.rows, running)
    if len(cut.lone_rows):
        made, behind = step(
            [part.index_select(0, cut.lone_places) for part in parts],
            states.index_select(0, cut.lone_rows),
        )
        states.index_copy_(0, cut.lone_rows, behind)
        if outputs is None:  # there are rows without tokens, and no longer ones
            outputs = steps.new_outputs(made, made.shape[1:])
        outputs.index_copy_(0, cut.lone_targets, made)
    assert outputs is not None  # a step has tokens
    return outputs[: steps.tokens], states
