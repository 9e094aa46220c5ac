"""Makes entries: keys of whole runs of tokens (`CompressionSpec`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tgi_trio.shard.torch_backend.layers.norm import Norm


@dataclass(frozen=True, slots=True, eq=False)
class Compressor:
    """Makes a layer's entries, or those of its index."""

    dim: int  # of an entry
    overlaps: bool
    bias: torch.Tensor  # float32 [rate, width], added to the weights of a run's tokens
    norm: Norm

    @property
    def width(self) -> int:
        """The numbers of a token that are averaged, and as many weights."""
        return self.bias.shape[1]

    @property
    def last(self) -> slice:
        """The part of a token's numbers that its own run's entry alone is made of.

        Nobody reads them of a run's last token once there is the entry, which takes their place.
        """
        return slice(self.width - self.dim, self.width)

    def compress(self, kept: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
        """Return entries [C, dim], not rotated yet.

        `kept`: [C, tokens, 2 width], what is kept of the tokens of a run, and before them those of
        the preceding run if they overlap; `missing`: bool [C, tokens], of tokens that are not
        there.
        """
        numbers, weights = kept.split(self.width, dim=-1)
        if self.overlaps:
            earlier, own = self.bias.split(self.dim, dim=-1)
            bias = torch.cat((earlier, own))
            numbers, weights = self._series(numbers), self._series(weights)
        else:
            bias = self.bias
        weights = (weights + bias).masked_fill(missing.unsqueeze(-1), float("-inf"))
        weights = torch.softmax(weights, dim=1, dtype=torch.float32).to(numbers.dtype)
        return self.norm((numbers * weights).sum(dim=1))

    def _series(self, part: torch.Tensor) -> torch.Tensor:
        """Return of the preceding run's tokens the first half of [C, tokens, width], of others the
        second.
        """
        rate = len(self.bias)
        return torch.cat((part[:, :rate, : self.dim], part[:, rate:, self.dim :]), dim=1)

    def nbytes(self) -> int:
        return self.bias.nbytes + self.norm.nbytes()
