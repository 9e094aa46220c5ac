"""Launching the kernels that choose: a pass over all scores, and a choice from what remains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from tgi_trio.shard.sampling.base import WIDTHS
from tgi_trio.shard.torch_backend.kernels.sampling import choosing, surveying
from tgi_trio.shard.torch_backend.kernels.sampling.shortlisting import DEPTHS
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import limit_registers, overlap

# Tokens of a part, which a surveying program holds in registers, and its warps.
PART: Final = 2048
SURVEY_WARPS: Final = 4
STRIP: Final = 512  # of them that are edited at a time
# Scores that a choosing program reads at a time. It mostly waits for memory; registers do not
# spill.
CHOSEN_BLOCK: Final = 2048
CHOSEN_WARPS: Final = 8
CHOSEN_REGISTERS: Final = 128  # for two programs on a multiprocessor; nothing spills
SHORTLIST: Final = 8192  # tokens of the longest shortlist; beyond, the whole row is read
PROGRAMS: Final = 1024  # of a launch; with more parts, a program has several
_LEAST_PROGRAMS: Final = 4  # of a row
# Tokens that a recording can list with a choice, of which at most half are wanted: as many as are
# listed for few (`MOST_TIES`). All of them are copied down and sorted, row by row.
LISTED: Final = 128
_LINE: Final = 32  # numbers; the width of rows of scores is a multiple of it


@dataclass(slots=True)
class DeviceInputs:
    """The inputs of the choosing kernels, on the device."""

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
    room: int = field(default=LISTED, kw_only=True)  # tokens that can be listed with a choice


@dataclass(slots=True)
class DeviceMasks:
    """`Masks` on the device."""

    green: torch.Tensor
    allowed: torch.Tensor
    bits: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Seen:
    """What surveying programs pass on to choosing ones, by choice; see `surveying.py`."""

    parts: torch.Tensor
    depths: torch.Tensor
    cuts: torch.Tensor
    plans: torch.Tensor


class ChoiceKernels:
    """Launches the choosing kernels for one vocabulary on one device."""

    def __init__(self, vocab_size: int, eos: torch.Tensor, device: torch.device, most: int) -> None:
        """`eos`: int32 [N]; `most`: choices of the largest step."""
        padded = max(16, next_power_of_2(vocab_size))
        self._vocab_size = vocab_size
        self._eos = eos
        self._device = device
        self.overlap = overlap(device)  # also for the kernel that counts, before these
        self._part, self._block = min(PART, padded), min(CHOSEN_BLOCK, padded)
        self._parts = -(-vocab_size // self._part)
        self._room = min(SHORTLIST, -(-vocab_size // _LINE) * _LINE)
        self._width = -(-vocab_size // _LINE) * _LINE + 2 * self._room
        self._arrived = torch.zeros(most, dtype=torch.int32, device=device)
        self._unmasked = torch.full((most,), -1, dtype=torch.int32, device=device)

    def make_scores(self, choices: int) -> torch.Tensor:
        """Allocate memory for edited scores, float32 [choices, >= vocab], and for shortlists."""
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
        device_inputs: DeviceInputs,
        masks: DeviceMasks | None,
        delta: float,
    ) -> None:
        """Choose from `logits` [C, >= vocab]; for the other arguments see the kernels."""
        seen = self._make_seen(len(logits))
        self._survey(found, chosen, counts, logits, scores, device_inputs, masks, delta, seen)
        choosing.choose_tokens[self._grid(len(logits))](
            found,
            chosen,
            listed,
            device_inputs.targets,
            logits,
            scores,
            device_inputs.temperatures,
            device_inputs.samples,
            device_inputs.uniforms,
            device_inputs.top_k,
            device_inputs.top_p,
            device_inputs.typical_p,
            device_inputs.floors,
            device_inputs.lists,
            seen.parts,
            seen.cuts,
            seen.plans,
            self._arrived,
            device_inputs.room,
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
        device_inputs: DeviceInputs,
        masks: DeviceMasks | None,
        delta: float,
        seen: _Seen,
    ) -> None:
        none = self._unmasked
        surveying.survey_scores[self._grid(len(logits))](
            found,
            chosen,
            device_inputs.targets,
            logits,
            scores,
            counts,
            device_inputs.slots,
            device_inputs.starts,
            device_inputs.entries,
            device_inputs.frequency,
            device_inputs.presence,
            device_inputs.unit,
            device_inputs.repetition,
            device_inputs.early,
            self._eos,
            none if masks is None else masks.bits,
            none if masks is None else masks.green,
            none if masks is None else masks.allowed,
            delta,
            device_inputs.temperatures,
            device_inputs.samples,
            device_inputs.uniforms,
            device_inputs.top_k,
            device_inputs.top_p,
            device_inputs.typical_p,
            device_inputs.floors,
            device_inputs.lists,
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
            PARTS=max(2, next_power_of_2(self._parts)),
            PART=self._part,
            STRIP=min(STRIP, self._part),
            DEPTHS=DEPTHS,
            ROOM=self._room,
            **self.overlap,
            num_warps=SURVEY_WARPS,
        )

    def _grid(self, choices: int) -> tuple[int, int]:
        """Return how many programs share a row, and the number of rows.

        Results do not depend on it: parts have a fixed size, and are added in order.
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
