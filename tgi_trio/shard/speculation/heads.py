"""Drafts by trained speculation heads. No torch in this file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.speculators.spec import HeadsSpec, MedusaSpec, MlpSpec
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.runner import DraftRow
from tgi_trio.shard.speculation.arithmetic import Arithmetic, Ids, Rows
from tgi_trio.shard.speculation.hidden import LastStep
from tgi_trio.shard.speculation.medusa import draft_by_medusa
from tgi_trio.shard.speculation.mlp import draft_by_mlp
from tgi_trio.shard.speculation.record import Record, find_record, judge_record, write_drafts
from tgi_trio.shard.speculation.sharing import share_room

Draft = Callable[[Any, Arithmetic, Rows, Ids, int], list[Ids]]

# Kinds' functions: `count` times int64 [n], after tokens [n] that `hidden` [n, features] chose.
DRAFT_FUNCTIONS: Final[dict[type[HeadsSpec], Draft]] = {
    MedusaSpec: draft_by_medusa,
    MlpSpec: draft_by_mlp,
}


class HeadsDrafter:
    """A drafter that drafts from the hidden state which chose a sequence's last token."""

    def __init__(
        self,
        spec: HeadsSpec,
        arithmetic: Arithmetic | None,
        last: LastStep,
        most: int,
        eos_ids: Iterable[int],
        token_map: NDArray[np.int64] | None = None,
    ) -> None:
        """Draft `most` tokens a step and sequence at most, as many as there are heads.

        `last`: the runner's, with the hidden states; without `arithmetic` it has drafts behind
        each in their place, int64 [heads]. `token_map`: the token that each row of a head
        stands for; None: its own number.
        """
        self._spec = spec
        self._arithmetic = arithmetic
        self._last = last
        self._most = min(most, spec.heads)
        self._eos_ids = frozenset(eos_ids)
        self._token_map = token_map

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        places = self._last.find_places(row.sequence for row in rows)
        ready = [row for row in rows if row.sequence.id in places]
        # Heads draft all at once, and wrong drafts predict little about the next ones.
        records = {
            row.sequence.id: judge_record(row.sequence, self._most, adapts=False) for row in ready
        }
        shared = share_room(ready, spare, allowed=lambda one: records[one.id].allowed)
        for record in records.values():
            if not record.allowed:
                record.rest -= 1
        if not shared:
            return {}
        hidden = self._last.pick([places[row.sequence.id] for row, _ in shared])
        ids = [row.sequence.token_ids[row.sequence.length - 1] for row, _ in shared]
        most = max(count for _, count in shared)
        drafts = self._draft(hidden, np.array(ids, np.int64), most)
        counts = {}
        for (row, count), own in zip(shared, drafts.tolist(), strict=True):
            record = records[row.sequence.id]
            counts[row.place] = write_drafts(row.sequence, record, own, count, self._eos_ids)
        return {place: count for place, count in counts.items() if count}

    @property
    def follows(self) -> bool:
        """See `FollowingDrafter`: where steps draft themselves, tokens by their own numbers."""
        return self._arithmetic is None and self._token_map is None

    def follow(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        """See `FollowingDrafter`: records are judged as steps are settled, not here."""
        records = {row.sequence.id: self._record(row.sequence) for row in rows}
        shared = share_room(rows, spare, allowed=lambda one: records[one.id].allowed)
        for record in records.values():
            if not record.allowed:
                record.rest -= 1
        return {row.place: count for row, count in shared}

    def judge(self, sequence: ShardSequence, count: int, right: int) -> None:
        """See `FollowingDrafter`."""
        self._record(sequence).note(count, right, self._most)

    def _record(self, sequence: ShardSequence) -> Record:
        return find_record(sequence, self._most, adapts=False)

    def _draft(self, hidden: Rows, tokens: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        if self._arithmetic is None:
            found: NDArray[np.int64] = hidden[:, :count]
        else:
            draft = DRAFT_FUNCTIONS[type(self._spec)]
            found = np.stack(draft(self._spec, self._arithmetic, hidden, tokens, count), axis=1)
        return found if self._token_map is None else self._token_map[found]
