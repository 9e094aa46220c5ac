"""Rows that fill gaps, in a step whose other tokens are chosen on the device.

What may follow there depends on the texts of the likeliest tokens (`shard/sampling/gaps.py`), which
only the host knows. So the host's sampler chooses for these rows from the scores on the device, and
its tokens take the place of the device's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.sampling.choosing import extend_by_drafts
from tgi_trio.shard.torch_backend.sampling.choice_settings import Choosing
from tgi_trio.shard.torch_backend.sampling.device_sampler import Found
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler


@dataclass(frozen=True, slots=True)
class ChosenInGaps:
    """The tokens of G choices in gaps."""

    places: NDArray[np.int64]  # [G]: among the step's choices
    targets: NDArray[np.int64]  # [G]: rows of the plan
    tokens: NDArray[np.float64]  # [G, 3]: as `Found` has them
    faults: dict[int, str]  # by choice

    def put(self, found: Found, chosen: torch.Tensor) -> None:
        """Write the tokens over those that the device has chosen; `chosen`: by row."""
        device = chosen.device
        own = torch.from_numpy(self.tokens).to(device)
        found.tokens[torch.from_numpy(self.places).to(device)] = own
        chosen[torch.from_numpy(self.targets).to(device)] = own[:, 0].to(chosen.dtype)


def choose_in_gaps(
    sampler: Sampler, choosing: Choosing, scores: torch.Tensor
) -> ChosenInGaps | None:
    """Choose for rows that fill gaps, except for those that are gone; None: there are none.

    `scores` [>= C, >= vocab]: the logits of the step's choices, which stay as they are. Every other
    row's last token must be known. Waits for the device.
    """
    fills = np.array([bool(row.sampling.gap_ends) for row in choosing.rows], np.bool_)
    fills[list(choosing.gone)] = False
    places = np.flatnonzero(fills[choosing.owners])
    if not len(places):
        return None
    pairs = zip(choosing.owners[places].tolist(), choosing.aheads[places].tolist(), strict=True)
    rows = [extend_by_drafts(choosing.rows[owner], ahead) for owner, ahead in pairs]
    own = scores[torch.from_numpy(places).to(scores.device)]  # a copy
    choices = sampler.choose(own, rows)
    tokens = np.zeros((len(places), 3))
    right = choices.counts > 0
    tokens[right, 0], tokens[right, 1] = choices.token_ids, choices.logprobs
    faults = {int(places[row]): why for row, why in choices.faults.items()}
    return ChosenInGaps(places, choosing.targets[places], tokens, faults)
