"""Launches of the kernels that choose: a look at every score, and a choice of what that leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from tgi_trio.shard.sampling.base import WIDTHS
from tgi_trio.shard.torch_backend.kernels import choosing, surveying
from tgi_trio.shard.torch_backend.kernels.shortlisting import DEPTHS
from tgi_trio.shard.torch_backend.torch_device import limit_registers, overlap

# Tokens of a program, and their warps: in registers of those who look them over.
PART: Final = 2048
SURVEY_WARPS: Final = 4
STRIP: Final = 512  # of them edited together
# Scores looked at together by those who choose, who wait for memory most of the time: what
# registers hold without a spill.
CHOSEN_BLOCK: Final = 2048
CHOSEN_WARPS: Final = 8
CHOSEN_REGISTERS: Final = 128  # two programs of a multiprocessor; it spills nothing
SHORTLIST: Final = 8192  # tokens of one; a row whose shortlist is longer is looked at as a whole
PROGRAMS: Final = 1024  # beyond which several parts of a row are one program's
_LEAST_PROGRAMS: Final = 4  # of a row
# Tokens that can be listed beside a choice in a recording, of which half are wanted at most: as
# many as are looked at for few (`MOST_TIES`). All of it comes down and is sorted, row by row.
LISTED: Final = 128
_LINE: Final = 32  # numbers: rows of scores are multiples of it


@dataclass(slots=True)
class Asked:
    """What the kernels are told, on the device; `found` is what they answer."""

    targets: torch.Tensor
    uniforms: torch.Tensor
    top_p: torch.Tensor
    typical_p: torch.Tensor
    floors: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    unit: torch.Tensor
    temperatures: torch.Tensor
    repetition: torch.Tensor
    samples: torch.Tensor
    top_k: torch.Tensor
    lists: torch.Tensor
    early: torch.Tensor
    inputs: torch.Tensor
    slots: torch.Tensor
    moves: torch.Tensor
    starts: torch.Tensor
    entries: torch.Tensor
    room: int = field(default=LISTED, kw_only=True)  # of what is listed of a choice


@dataclass(slots=True)
class DeviceMasks:
    """`Masks` on the device."""

    green: torch.Tensor
    allowed: torch.Tensor
    bits: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Seen:
    """What those who look over the scores tell those who choose, by choice; see `surveying.py`."""

    parts: torch.Tensor
    depths: torch.Tensor
    cuts: torch.Tensor
    plans: torch.Tensor


class ChoiceKernels:
    """The kernels as they are launched for one vocabulary on one device."""

    def __init__(self, vocab_size: int, eos: torch.Tensor, device: torch.device, most: int) -> None:
        """`eos` int32 [N]; `most`: choices of a step."""
        padded = max(16, 1 << (vocab_size - 1).bit_length())
        self._vocab_size = vocab_size
        self._eos = eos
        self._device = device
        self.overlap = overlap(device)  # with which they begin, and what counts before them
        self._part, self._block = min(PART, padded), min(CHOSEN_BLOCK, padded)
        self._parts = -(-vocab_size // self._part)
        self._room = min(SHORTLIST, -(-vocab_size // _LINE) * _LINE)
        self._width = -(-vocab_size // _LINE) * _LINE + 2 * self._room
        self._arrived = torch.zeros(most, dtype=torch.int32, device=device)
        self._unmasked = torch.full((most,), -1, dtype=torch.int32, device=device)

    def make_scores(self, choices: int) -> torch.Tensor:
        """Return memory for edited scores, float32 [choices, >= vocab], and for shortlists."""
        shape = (choices, self._width)
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def launch(
        self,
        found: torch.Tensor,
        listed: torch.Tensor,
        chosen: torch.Tensor,
        counts: torch.Tensor,
        logits: torch.Tensor,
        scores: torch.Tensor,
        asked: Asked,
        masks: DeviceMasks | None,
        delta: float,
    ) -> None:
        """Choose from `logits` [C, >= vocab]; the rest as in the kernels."""
        seen = self._make_seen(len(logits))
        self._survey(found, chosen, counts, logits, scores, asked, masks, delta, seen)
        choosing.choose_tokens[self._grid(len(logits))](
            found,
            chosen,
            listed,
            asked.targets,
            logits,
            scores,
            asked.temperatures,
            asked.samples,
            asked.uniforms,
            asked.top_k,
            asked.top_p,
            asked.typical_p,
            asked.floors,
            asked.lists,
            seen.parts,
            seen.cuts,
            seen.plans,
            self._arrived,
            asked.room,
            logits.stride(0),
            scores.stride(0),
            self._vocab_size,
            FEW=WIDTHS[-1],
            PART=self._part,
            BLOCK=self._block,
            DEPTHS=DEPTHS,
            ROOM=self._room,
            **self.overlap,
            num_warps=CHOSEN_WARPS,
            **limit_registers(CHOSEN_REGISTERS),
        )

    def _survey(
        self,
        found: torch.Tensor,
        chosen: torch.Tensor,
        counts: torch.Tensor,
        logits: torch.Tensor,
        scores: torch.Tensor,
        asked: Asked,
        masks: DeviceMasks | None,
        delta: float,
        seen: _Seen,
    ) -> None:
        none = self._unmasked
        surveying.survey_scores[self._grid(len(logits))](
            found,
            chosen,
            asked.targets,
            logits,
            scores,
            counts,
            asked.slots,
            asked.starts,
            asked.entries,
            asked.frequency,
            asked.presence,
            asked.unit,
            asked.repetition,
            asked.early,
            self._eos,
            none if masks is None else masks.bits,
            none if masks is None else masks.green,
            none if masks is None else masks.allowed,
            delta,
            asked.temperatures,
            asked.samples,
            asked.uniforms,
            asked.top_k,
            asked.top_p,
            asked.typical_p,
            asked.floors,
            asked.lists,
            seen.parts,
            seen.depths,
            seen.cuts,
            seen.plans,
            self._arrived,
            len(logits),
            0 if masks is None else masks.bits.shape[1],
            logits.stride(0),
            scores.stride(0),
            self._vocab_size,
            EOS=len(self._eos),
            PARTS=max(2, 1 << (self._parts - 1).bit_length()),
            PART=self._part,
            STRIP=min(STRIP, self._part),
            DEPTHS=DEPTHS,
            ROOM=self._room,
            **self.overlap,
            num_warps=SURVEY_WARPS,
        )

    def _grid(self, choices: int) -> tuple[int, int]:
        """Return how many programs share a row, and the rows.

        What they find does not depend on it: parts are of one size, and added up in their order.
        """
        return min(self._parts, max(_LEAST_PROGRAMS, PROGRAMS // choices)), choices

    def _make_seen(self, choices: int) -> _Seen:
        def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty((choices, *shape), dtype=dtype, device=self._device)

        return _Seen(
            make(torch.float64, self._parts, 4),
            make(torch.int32, self._parts, DEPTHS),
            make(torch.int32, self._parts, 2),
            make(torch.float64, 6),
        )
