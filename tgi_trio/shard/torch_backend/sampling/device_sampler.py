"""Choosing tokens on the device, where the logits are, without waiting for the host.

The sampling parameters are uploaded in one copy. Three kernels update counts
(`kernels/sampling/counting.py`), edit and survey all scores (`kernels/sampling/surveying.py`), and
choose for rows that the survey has not settled (`kernels/sampling/choosing.py`). Results come down
in one copy, followed by an event. Tokens stay on the device for the next step, which may be
launched before the host knows them; so do the counts. For the same logits the choice equals that of
the host's sampler (`torch_sampler.Sampler`): random numbers are Philox of (seed, position), and
every threshold is exact, however flat the distribution.

Rows with a grammar or a watermark have masks (`choice_masks.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from tgi_trio.ipc.frame_codec import fixed_array
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.torch_backend.kernels.sampling import counting
from tgi_trio.shard.torch_backend.kernels.sampling.surveying import KEPT, NOBODY
from tgi_trio.shard.torch_backend.sampling.choice_kernels import (
    LISTED,
    ChoiceKernels,
    DeviceInputs,
    DeviceMasks,
)
from tgi_trio.shard.torch_backend.sampling.choice_masks import Masks
from tgi_trio.shard.torch_backend.sampling.choice_settings import (
    ChoiceSettings,
    Choosing,
    count_units,
    count_up,
    nobody,
    repeat,
    too_early,
)
from tgi_trio.shard.torch_backend.sampling.edits import list_edits
from tgi_trio.shard.torch_backend.sampling.resident_counts import NONE, ResidentCounts
from tgi_trio.shard.torch_backend.staging import (
    Array,
    Sheet,
    Staging,
    packed_size,
    rest,
    split,
)

_BLOCK = 1024  # counts that a program updates at a time
# Inputs of a choice that is not made, in the order of `DeviceInputs`, without target and entries.
_OF_NOBODY = (0, 0, 1, 1, -np.inf, 0, 0, 1, 1, 1, 0, 0, 0, 0, -1, -1, NONE)
# Indices of the arrays that may change from step to step; the last three are edits.
_UNIFORMS, _UNIT, _EARLY, _SLOTS = 1, 7, 13, 15
_KNOWN_ENTRIES = 1 << 16  # for which a recording has room


@dataclass(frozen=True, slots=True)
class Found:
    """What a step chose, on the device."""

    tokens: torch.Tensor  # float64 [C, 3]: token, log-probability, fault
    # int32 [C, room, 2]: the top tokens of choices that list some, from `kernels.sampling.listing`;
    # None if no choice does.
    listed: torch.Tensor | None
    drafts: torch.Tensor | None = None  # int64 [C, heads] after each; None: no drafter here

    def first(self, count: int, *, lists: bool) -> Found:
        """Return views of the first `count` choices; `lists`: any of them lists tokens."""
        listed, drafts = self.listed if lists else None, self.drafts
        return Found(
            self.tokens[:count],
            None if listed is None else listed[:count],
            None if drafts is None else drafts[:count],
        )


@dataclass(frozen=True, slots=True)
class HostInputs:
    """The kernels' inputs for some choices, on the host."""

    arrays: list[Array]
    entries: Array
    standing: ChoiceSettings | None  # the rows whose biases are all there is in `entries`
    widest: int  # most tokens listed with a choice; 0: none


@dataclass(frozen=True, slots=True)
class _Kept:
    """The last inputs of rows with one choice each, of which some depend on positions."""

    settings: ChoiceSettings
    size: int
    known: Array  # read-only
    host_inputs: HostInputs


@dataclass(slots=True)
class ReservedEntries:
    """Memory for entries that does not move."""

    memory: torch.Tensor  # uint8
    standing: ChoiceSettings | None = None  # the rows whose biases are in it


@dataclass(slots=True)
class Reserved:
    """Memory for the kernels' inputs that does not move."""

    sheet: Sheet  # the arrays of `HostInputs`
    entries: ReservedEntries
    device_inputs: DeviceInputs  # views of both
    idle: HostInputs  # inputs of choices that are made later


@dataclass(slots=True)
class ReservedMasks:
    """Memory for masks that does not move."""

    size: int  # choices
    memory: torch.Tensor  # uint8
    here: DeviceMasks  # views of it


class ChoiceDrafter(Protocol):
    """A drafter that drafts after each choice; see `device_drafting.py`."""

    most: int  # drafts

    def draft(self, hidden: torch.Tensor, found: torch.Tensor) -> torch.Tensor: ...


class DeviceSampler:
    """Chooses tokens on one device."""

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Iterable[int],
        device: torch.device,
        most_rows: int,
        delta: float = 0.0,
        drafting: ChoiceDrafter | None = None,
    ) -> None:
        """`most_rows`: choices of a step; `delta`: the watermark's; `drafting`: drafts after them.

        Raises ImportError if Triton is not installed.
        """
        self.most_rows = most_rows
        self.vocab_size = vocab_size
        self._device = device
        self._delta = delta
        self.drafting = drafting
        self._staging = Staging(device)
        self._mask_staging = Staging(device)
        eos = torch.from_numpy(np.array(sorted(eos_ids), np.int32)).to(device)
        self._kernels = ChoiceKernels(vocab_size, eos, device, most_rows)
        self._settings: ChoiceSettings | None = None
        self._listed: list[ShardSequence] | None = None  # the list that they belong to
        self._kept: _Kept | None = None  # of the last step
        # The tokens that the last step chose, by row.
        self.chosen = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self.make_room(1)

    def make_room(self, rows: int) -> None:
        """Allocate counts for up to `rows` rows of a step, as much memory as their scores take.

        To be called before anything is recorded.
        """
        self._resident = ResidentCounts(rows)
        shape = (rows, self.vocab_size)
        self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)

    def drop(self, row: ShardSequence) -> None:
        """Free a row's counts."""
        self._resident.release(row)

    def settings(self, rows: list[ShardSequence]) -> ChoiceSettings:
        """Return the rows' parameters, kept while the list stays the same, as in most steps."""
        if self._settings is None or (rows is not self._listed and self._settings.rows != rows):
            self._settings = ChoiceSettings.of(rows, self.vocab_size)
        self._listed = rows
        return self._settings

    def keeps(self, host_inputs: HostInputs) -> bool:
        """Return whether the next step of the same rows would have the same inputs."""
        return (
            self._kept is not None
            and self._kept.host_inputs is host_inputs
            and self._kept.settings.stays
        )

    def make_inputs(
        self, choosing: Choosing, size: int | None = None, rest: int = NOBODY
    ) -> HostInputs:
        """Return the kernels' inputs for some choices; to be used exactly once, as counts move.

        `size`: choices of the recording; targets of surplus ones are `rest`, and their other inputs
        are not included.
        """
        settings, count = self.settings(choosing.rows), len(choosing.owners)
        size = size or count
        known = repeat(-1, count, np.int32) if choosing.unknown is None else choosing.unknown
        decodes, kept = choosing.targets is count_up(count) and rest == NOBODY, self._kept
        same = decodes and kept is not None and kept.settings is settings and kept.known is known
        if kept is not None and same and kept.size == size:
            return kept.host_inputs if settings.stays else self._move_inputs(choosing, kept)
        edits = list_edits(choosing, settings, self._resident, size)
        cuts, others = settings.of_choices(choosing)
        if decodes:
            targets = count_up(count, size, rest)
        else:
            targets = np.concatenate((choosing.targets, np.full(size - count, rest)))
        arrays = [
            *(targets, settings.draw(choosing), *cuts, count_units(choosing, settings), *others),
            *(too_early(choosing, settings), known, edits.slots, edits.moves, edits.starts),
        ]
        standing = settings if edits.standing else None
        host_inputs = HostInputs(arrays, edits.entries, standing, settings.widest)
        if decodes and fixed_array(known) is not None:
            self._kept = _Kept(settings, size, known, host_inputs)
        return host_inputs

    def _move_inputs(self, choosing: Choosing, kept: _Kept) -> HostInputs:
        """Compute `make_inputs` for the rows of the last step at their new positions."""
        settings, host_inputs = kept.settings, kept.host_inputs
        arrays = host_inputs.arrays.copy()
        if settings.samples:
            arrays[_UNIFORMS] = settings.draw(choosing)
        if settings.waits:
            arrays[_EARLY] = too_early(choosing, settings)
        if not settings.penalised and not settings.forbidding:
            return HostInputs(arrays, host_inputs.entries, host_inputs.standing, host_inputs.widest)
        edits = list_edits(choosing, settings, self._resident, kept.size)
        arrays[_UNIT] = count_units(choosing, settings)
        arrays[_SLOTS:] = edits.slots, edits.moves, edits.starts
        return HostInputs(
            arrays, edits.entries, settings if edits.standing else None, host_inputs.widest
        )

    def ask_nothing(self, size: int) -> HostInputs:
        """Return the kernels' inputs for `size` choices that are made later."""
        host_inputs = self.make_inputs(nobody(), size, KEPT)
        *columns, starts = host_inputs.arrays
        padded = [
            np.concatenate((column, np.full(size - len(column), value, column.dtype)))
            for column, value in zip(columns, _OF_NOBODY, strict=True)
        ]
        for array in padded:
            array.flags.writeable = False
        return replace(host_inputs, arrays=[*padded, starts])

    def make_scores(self, choices: int) -> torch.Tensor:
        """Allocate memory for the scores of choices, float32 [choices, >= vocab_size]."""
        return self._kernels.make_scores(choices)

    def upload(self, host_inputs: HostInputs) -> DeviceInputs:
        """Upload what `make_inputs` returned."""
        some = host_inputs.entries if len(host_inputs.entries) else np.zeros((1, 2), np.int32)
        room = max(LISTED, 2 << max(0, host_inputs.widest - 1).bit_length())
        return DeviceInputs(*self._staging.upload([*host_inputs.arrays, some]), room=room)

    def reserve(
        self,
        size: int,
        memory: torch.Tensor | None = None,
        entries: ReservedEntries | None = None,
    ) -> Reserved:
        """Reserve memory for the inputs of `size` choices.

        `memory`: for the arrays of `make_inputs`, where others upload as well; None: it is
        allocated and filled. `entries`: memory for those; None: it is allocated.
        """
        idle, shared = self.ask_nothing(size), memory is not None
        if memory is None:
            memory = torch.zeros(packed_size(idle.arrays), dtype=torch.uint8, device=self._device)
            self._staging.fill(memory, idle.arrays)
        if entries is None:
            bytes_of_all = 8 * _KNOWN_ENTRIES
            entries = ReservedEntries(
                torch.zeros(bytes_of_all, dtype=torch.uint8, device=self._device)
            )
        views = [*split(memory, idle.arrays), entries.memory.view(torch.int32).view(-1, 2)]
        sheet = Sheet(idle.arrays, memory, shared=shared)
        return Reserved(sheet, entries, DeviceInputs(*views), idle)

    def fits(self, host_inputs: HostInputs) -> bool:
        """Return whether reserved memory has room for these inputs."""
        return len(host_inputs.entries) <= _KNOWN_ENTRIES and 2 * host_inputs.widest <= LISTED

    def refill(self, reserved: Reserved, host_inputs: HostInputs) -> None:
        """Replace all inputs."""
        self._staging.fill_from(reserved.sheet, host_inputs.arrays)
        self.refill_entries(reserved, host_inputs)

    def refill_entries(self, reserved: Reserved, host_inputs: HostInputs) -> None:
        """Replace the entries; biases that are already there are not uploaded again."""
        there = reserved.entries
        if not len(host_inputs.entries):
            return  # the kernels read none
        if host_inputs.standing is not None and there.standing is host_inputs.standing:
            return
        there.standing = None
        self._staging.fill(there.memory, [host_inputs.entries])
        there.standing = host_inputs.standing

    def upload_masks(self, masks: Masks) -> DeviceMasks:
        """Upload masks."""
        return DeviceMasks(*self._mask_staging.upload([masks.green, masks.allowed, masks.bits]))

    def reserve_masks(self, size: int, memory: torch.Tensor | None = None) -> ReservedMasks:
        """Reserve memory for two masks for each of `size` choices; `memory`: to be shared."""
        none, words = np.full(size, -1, np.int32), -(-self.vocab_size // 32)
        if memory is None:
            needed = packed_size([none, none]) + 8 * size * words
            memory = torch.zeros(needed, dtype=torch.uint8, device=self._device)
            self._mask_staging.fill(memory, [none, none])
        bits = rest(memory, [none, none], torch.int32)[: 2 * size * words].view(-1, words)
        green, allowed = split(memory, [none, none])
        return ReservedMasks(size, memory, DeviceMasks(green, allowed, bits))

    def refill_masks(self, reserved: ReservedMasks, masks: Masks) -> None:
        """Replace the masks; surplus choices have none."""
        green, allowed = masks.green, masks.allowed
        if (missing := reserved.size - len(green)) > 0:
            more = repeat(-1, missing, np.int32)
            green, allowed = np.concatenate((green, more)), np.concatenate((allowed, more))
        self._mask_staging.fill(reserved.memory, [green, allowed, masks.bits])

    def choose(
        self,
        logits: torch.Tensor,
        device_inputs: DeviceInputs,
        masks: DeviceMasks | None = None,
        hidden: torch.Tensor | None = None,
        scores: torch.Tensor | None = None,
    ) -> Found:
        """Launch the choice; return it, and leave its tokens in `chosen`.

        `logits`: [C, >= vocab_size] of any dtype; `hidden`: [C, features], for drafters; `scores`:
        from `make_scores`, or the logits themselves. For a choice that is made later, the scores
        are the logits.
        """
        count, room = len(logits), device_inputs.room
        counting.count_tokens[(count,)](
            self._counts,
            device_inputs.slots,
            device_inputs.moves,
            device_inputs.starts,
            device_inputs.entries,
            device_inputs.inputs,
            self.chosen,
            self.vocab_size,
            BLOCK=_BLOCK,
            **self._kernels.overlap,
        )
        found = torch.empty((count, 3), dtype=torch.float64, device=self._device)
        listed = torch.empty((count, room, 2), dtype=torch.int32, device=self._device)
        self._kernels.launch(
            found,
            listed,
            self.chosen,
            self._counts,
            logits,
            self.make_scores(count) if scores is None else scores,
            device_inputs,
            masks,
            self._delta,
        )
        if self.drafting is None or hidden is None:
            return Found(found, listed)
        return Found(found, listed, self.drafting.draft(hidden, found))
