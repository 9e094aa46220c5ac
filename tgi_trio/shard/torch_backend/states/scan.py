"""Runs a recurrence over the rows of a step, whatever their lengths.

The recurrence is given as two functions that compute the same: one takes one token of every row,
the other a chunk of tokens of some rows, by a few large products instead of many small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tgi_trio.shard.torch_backend.states.steps import StateSteps

Parts = Sequence[torch.Tensor]
# (parts [R, ...] each, states [R, ...]) -> (outputs [R, ...], states after them)
Step = Callable[[Parts, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# The same for parts [R, L, ...], with `there` [R, L] between parts and states: which entries are
# tokens. The others, after a row's last token, must leave its state unchanged.
Chunk = Callable[[Parts, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def scan_rows(
    parts: Parts, states: torch.Tensor, steps: StateSteps, step: Step, chunk: Chunk, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a recurrence's outputs [T, ...] and the states [R, ...] after the rows' last tokens.

    `parts` [T, ...] each: what it reads of the tokens; `states` [R, ...]: before the rows' first
    tokens; may be overwritten; `size`: the most tokens of a chunk.
    """
    if steps.decodes:
        return step(parts, states)
    cut = steps.chunks(size)
    outputs: torch.Tensor | None = None
    running = states.index_select(0, cut.rows)
    for turn in cut.turns:
        n = len(turn.places)
        made, after = chunk([part[turn.places] for part in parts], turn.there, running[:n])
        running[:n] = after
        if outputs is None:
            outputs = steps.new_outputs(made, made.shape[2:])
        outputs.index_copy_(0, turn.targets, made.flatten(0, 1).index_select(0, turn.own))
    states.index_copy_(0, cut.rows, running)
    if len(cut.lone_rows):
        made, after = step(
            [part.index_select(0, cut.lone_places) for part in parts],
            states.index_select(0, cut.lone_rows),
        )
        states.index_copy_(0, cut.lone_rows, after)
        if outputs is None:  # no row has several tokens, but some have none
            outputs = steps.new_outputs(made, made.shape[1:])
        outputs.index_copy_(0, cut.lone_targets, made)
    assert outputs is not None  # a step has tokens
    return outputs[: steps.tokens], states
