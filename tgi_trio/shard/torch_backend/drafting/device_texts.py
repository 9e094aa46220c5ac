"""N-gram drafts on the device: texts of sequences are kept and looked up there.

When a sequence arrives, its tokens are uploaded to a slot of its own. From then on the recording of
each step adds the tokens that it has chosen (`kernels/drafting/prompt_lookup.py`). Tokens that only
the host knows, from steps in between that were launched without this, are uploaded before the next
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.torch_backend.kernels.drafting import prompt_lookup
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.row_slots import RowSlots
from tgi_trio.shard.torch_backend.sampling.choice_settings import Choosing
from tgi_trio.shard.torch_backend.staging import Array, Staging

MOST_TOKENS: Final = 1 << 25  # of all texts together: 128 MiB
_PROGRAMS = 512  # most programs of a lookup
_MOST_PIECES: Final = 32  # most programs that share a text
_BLOCK: Final = 1024  # tokens that a program compares at a time; the most tokens of a piece
_SENT: Final = 64  # most pieces in one upload


@dataclass(slots=True)
class _Text:
    """What the device knows of a text."""

    reach: int  # the number of leading tokens that are certain
    place: int  # where the last step began
    ends: bool  # whether EOS ends the text


@dataclass(frozen=True, slots=True)
class _Piece:
    """At most `_BLOCK` tokens of a text, for upload."""

    slot: int
    place: int
    tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Judged:
    """A step's choices, and how many drafts of each row were right; on the device."""

    found: torch.Tensor  # float64 [C, 3]
    ids: torch.Tensor  # int64 [C]: the token after which each choice is made
    positions: torch.Tensor  # int64 [C]: of that token
    targets: torch.Tensor  # int64 [C]: row, -1: none
    aheads: torch.Tensor  # int32 [C]
    moved: torch.Tensor  # int32 [rows]
    slots: torch.Tensor  # int32 [C], from `DeviceTexts.arrays`, like the next
    ends: torch.Tensor  # int32 [C]


class DeviceTexts:
    """The texts of one device's sequences."""

    def __init__(self, most: int, eos_ids: Iterable[int], device: torch.device, rows: int) -> None:
        """`most`: drafts of a row; `rows`: of the largest step. `make_room` allocates memory."""
        self.most = most
        self._device = device
        self._staging = Staging(device)
        eos = np.array(sorted(eos_ids), np.int32)
        self._eos_count = len(eos)
        self._eos = torch.from_numpy(eos if len(eos) else np.zeros(1, np.int32)).to(device)
        self._best = torch.zeros(rows, dtype=torch.int32, device=device)
        self._arrived = torch.zeros_like(self._best)
        self._take_room(1, 0)

    def make_room(self, rows: int, positions: int) -> None:
        """Allocate texts for up to `rows` rows of a step, with `positions` tokens each.

        With fewer tokens if all together would exceed `MOST_TOKENS`. To be called before anything
        is recorded.
        """
        wanted = positions + self.most + 2  # a step after one that is not read may go further
        room = min(wanted, MOST_TOKENS // rows, prompt_lookup.LONGEST - 16)
        self._take_room(rows, max(16, -(-room // 16) * 16))
        nothing = _Piece(0, 0, np.zeros(min(_BLOCK, self.room), np.int32))
        self._send([nothing] * _SENT)  # compiles the kernel and allocates staging memory

    def _take_room(self, rows: int, room: int) -> None:
        self.room = room
        self._slots = RowSlots(rows)
        self._texts: dict[int, _Text] = {}  # by slot
        self._tokens = torch.zeros((rows, room), dtype=torch.int32, device=self._device)

    def holds(self, plan: StepPlan) -> bool:
        """Return whether there is room for the texts of a plan of decodes and for what it adds."""
        longest = int(plan.positions.max()) + self.most + 2
        turned = plan.rotary_positions is not None  # these are uploaded in place of positions
        return not turned and longest <= self.room and len(plan.rows) <= self._slots.slots

    def arrays(self, plan: StepPlan, choosing: Choosing) -> list[Array]:
        """Return, int32 [C] each, the choices' texts (-1: none) and whether EOS ends these.

        Uploads the tokens that the texts lack. `holds` has accepted the plan.
        """
        firsts = np.flatnonzero(choosing.aheads == 0)
        places = (choosing.positions[firsts] - 1).tolist()
        pieces: list[_Piece] = []
        own = np.full(len(choosing.rows), -1, np.int32)
        stops = np.zeros(len(choosing.rows), np.int32)
        for i, (row, place) in enumerate(zip(choosing.rows, places, strict=True)):
            slot = self._slots.find(row)
            if slot is None:
                slot = None if plan.moves else self._slots.take(row, choosing.rows)
                if slot is None:  # only the device knows the latest tokens of such a text
                    continue
                self._texts[slot] = _Text(0, -1, not row.sampling.ignore_eos)
            text = self._texts[slot]
            pieces += _find_news(slot, text, row, place, follows=plan.moves)
            own[i], stops[i] = slot, text.ends
        for first in range(0, len(pieces), _SENT):
            self._send(pieces[first : first + _SENT])
        return [own[choosing.owners], stops[choosing.owners]]

    def drop(self, row: ShardSequence) -> None:
        """Free a sequence's slot."""
        self._slots.release(row)

    def look_up(self, judged: Judged, drafted: torch.Tensor) -> torch.Tensor:
        """Add chosen tokens to the texts; return what follows each row's last accepted choice.

        The result is int64 [C, most], -1 for nothing, arbitrary at all other choices. `drafted`,
        int64 [rows, most], receives the same by row.
        """
        count = len(judged.targets)
        behind = torch.empty((count, self.most), dtype=torch.int64, device=self._device)
        prompt_lookup.keep_tokens[(count,)](
            *(self._tokens, judged.slots, judged.targets, judged.aheads, judged.positions),
            *(judged.ids, judged.found, judged.moved, self.room),
        )
        fits = min(_PROGRAMS // count, -(-self.room // _BLOCK), _MOST_PIECES)
        prompt_lookup.look_up[(count, max(1, fits))](
            *(drafted, behind, self._best, self._arrived, self._tokens),
            *(judged.slots, judged.targets, judged.aheads, judged.positions, judged.moved),
            *(judged.ends, self._eos, self.room),
            EOS=self._eos_count,
            PADDED_EOS=next_power_of_2(self._eos_count),
            MOST=self.most,
            BLOCK=_BLOCK,
            LONGEST=prompt_lookup.LONGEST,
        )
        return behind

    def _send(self, pieces: Sequence[_Piece]) -> None:
        """Upload up to `_SENT` pieces of texts to their places."""
        slots = np.array([piece.slot for piece in pieces], np.int32)
        places = np.array([piece.place for piece in pieces], np.int32)
        starts = np.zeros(len(pieces) + 1, np.int32)
        np.cumsum([len(piece.tokens) for piece in pieces], out=starts[1:])
        tokens = np.concatenate([*(piece.tokens for piece in pieces), np.zeros(1, np.int32)])
        sent = self._staging.upload([slots, places, starts, tokens])
        prompt_lookup.write_texts[(len(pieces),)](self._tokens, *sent, self.room, BLOCK=_BLOCK)


def _find_news(
    slot: int, text: _Text, row: ShardSequence, place: int, *, follows: bool
) -> Iterator[_Piece]:
    """Yield the tokens that the device lacks of a text, before a step that begins at `place`.

    The step brings that token itself. `follows`: the step moves rows after another one, by tokens
    that the device has kept. A repeated step may have followed tokens that are void, so what it
    wrote is written again.
    """
    if place <= text.place:
        text.reach = min(text.reach, place)
    text.place = place
    if not follows:
        for first in range(text.reach, row.length, _BLOCK):
            yield _Piece(slot, first, row.token_ids[first : min(first + _BLOCK, row.length)])
    text.reach = max(text.reach, row.length, place + 1)
