"""Drafts that are right as often as trained ones: tiny drafters with random weights never are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.runner import Drafter, DraftRow
from tgi_trio.shard.speculation.record import find_record

_MOST = 4  # drafts of a row
_WRONG = 4  # every so many drafts one is wrong


class Foretelling:
    """Puts what a sequence will say in the place of what its drafter drafts, mostly."""

    def __init__(self, drafter: Drafter, texts: Mapping[int, Sequence[int]], vocab: int) -> None:
        """`texts`: the tokens that sequences will say, by id."""
        self._drafter, self._texts, self._vocab = drafter, texts, vocab
        self._made = 0

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        found = dict(self._drafter.draft_rows(rows, spare))
        left = spare - sum(found.values())
        for row in rows:
            count = found.get(row.place, 0)
            more = 0 if count else max(0, min(left, row.room, _MOST))
            own = self._write(row.sequence, count or more)
            left -= own if not count else 0
            if own:
                found[row.place] = max(count, own)
        return found

    def _write(self, sequence: ShardSequence, most: int) -> int:
        """Write up to `most` drafts behind what a sequence has said; return how many."""
        said, at = sequence.length - sequence.prompt_length, sequence.length
        most = min(most, len(sequence.token_ids) - at)
        coming = list(self._texts.get(sequence.id, ()))[said : said + most]
        for i, token in enumerate(coming):
            self._made += 1
            wrong = self._made % _WRONG == 0
            sequence.token_ids[at + i] = (token + 1) % self._vocab if wrong else token
        if coming:
            record = find_record(sequence, _MOST, adapts=True)
            record.place, record.drafts = at, sequence.token_ids[at : at + len(coming)].tolist()
        return len(coming)
