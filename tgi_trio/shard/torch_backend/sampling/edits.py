"""The edits of a step's scores: counts for penalties, which move with them, drafts and biases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.frame_codec import fixed_array
from tgi_trio.shard.torch_backend.sampling.choice_settings import (
    NO_ENTRIES,
    ChoiceSettings,
    Choosing,
    Edits,
    Followed,
    fix,
    repeat,
    too_early,
)
from tgi_trio.shard.torch_backend.sampling.resident_counts import ADD, NONE, ResidentCounts
from tgi_trio.shard.torch_backend.staging import Array


def list_edits(
    choosing: Choosing, settings: ChoiceSettings, counts: ResidentCounts, size: int | None = None
) -> Edits:
    """Return the edits of a step's choices, to be made exactly once, since counts move with them.

    `size`: choices that `starts` includes; surplus ones have no edits.
    """
    count, size = len(choosing), size or len(choosing)
    biases = _choose_biases(choosing, settings)
    if choosing.alone and biases is None:
        if size not in settings.standing:
            settings.standing[size] = _list_biases(choosing, settings, size)
        standing = settings.standing[size]
        if not settings.penalised:
            return standing
        if (followed := _follow(choosing, settings, counts, standing)) is not None:
            return followed
    slots, moves = np.full(count, -1, np.int32), np.full(count, NONE, np.int32)
    starts = np.zeros((3, size + 1), np.int32)
    lists: list[list[Array]] = [[], [], []]
    own = np.empty(len(choosing.rows), np.int32)
    for c in np.flatnonzero(_find_counted(choosing, settings)).tolist():
        owner, ahead = int(choosing.owners[c]), int(choosing.aheads[c])
        if ahead:
            drafts = choosing.drafts(c)
            starts[1, c + 1] = ahead
            lists[1].append(np.stack((drafts, np.zeros_like(drafts)), axis=1))
        else:
            unknown = choosing.unknown is not None and bool(choosing.unknown[c] >= 0)
            row, length = choosing.rows[owner], int(choosing.positions[c])
            news = counts.advance(row, length, unknown, choosing.rows)
            own[owner], moves[c], starts[0, c + 1] = news.slot, news.move, len(news.ids)
            lists[0].append(np.stack((news.ids, news.more), axis=1))
        slots[c] = own[owner]
    alone = choosing.alone and biases is None and not starts[:2].any()
    if biases is None and settings.columns["biased"].any():
        biases = [settings.biases[owner] for owner in choosing.owners.tolist()]
    for c, entries in enumerate(biases or ()):
        starts[2, c + 1] = len(entries)
        lists[2].append(entries)
    flat = [entries for kind in lists for entries in kind]
    ends = np.cumsum(starts.ravel()).reshape(starts.shape).astype(np.int32)
    return Edits(slots, moves, ends, np.concatenate(flat) if flat else NO_ENTRIES, alone)


def _find_counted(choosing: Choosing, settings: ChoiceSettings) -> NDArray[np.bool_]:
    """Return which choices depend on counts: those of rows with penalties that are still there.

    The unwritten last token of a row that has left would be an address beyond the table: memory of
    others, which the kernel would change.
    """
    counted: NDArray[np.bool_] = settings.columns["counted"]
    if len(choosing.gone):
        counted = counted.copy()
        counted[list(choosing.gone)] = False
    return counted[choosing.owners]


def _choose_biases(choosing: Choosing, settings: ChoiceSettings) -> list[Array] | None:
    """Return each choice's biases where some row's own ends are still forbidden, else None."""
    if not settings.forbidding:
        return None
    early = too_early(choosing, settings).tolist()
    if not any(early):
        return None
    return [
        settings.forbidding.get(owner, settings.biases[owner])
        if early[c]
        else settings.biases[owner]
        for c, owner in enumerate(choosing.owners.tolist())
    ]


def _follow(
    choosing: Choosing, settings: ChoiceSettings, counts: ResidentCounts, standing: Edits
) -> Edits | None:
    """Return the edits of decodes with penalties whose last tokens the device counts itself.

    None, with nothing changed, if that is not so for some row, or if it lacks other tokens.
    """
    unknown, places, kept = choosing.unknown, settings.places, settings.followed
    if unknown is None:
        return None
    known = kept is None or kept.unknown is not unknown
    if known and not (unknown[places] >= 0).all():
        return None
    every = len(places) == len(unknown)
    positions = choosing.positions if every else choosing.positions[places]
    own = counts.follow(settings.penalised, positions)
    if own is None:
        return None
    if kept is not None and not known and kept.slots is own and kept.standing is standing:
        return kept.edits
    slots, moves = np.full(len(unknown), -1, np.int32), np.full(len(unknown), NONE, np.int32)
    slots[places], moves[places] = own, ADD
    edits = replace(standing, slots=fix(slots), moves=fix(moves))
    settings.followed = None
    if fixed_array(unknown) is not None:
        settings.followed = Followed(unknown, own, standing, edits)
    return edits


def _list_biases(choosing: Choosing, settings: ChoiceSettings, size: int) -> Edits:
    """Return the edits of rows with one choice each, by biases alone."""
    count, starts = len(choosing), np.zeros((3, size + 1), np.int32)
    starts[2, 1 : count + 1] = [len(biases) for biases in settings.biases]
    ends = np.cumsum(starts.ravel()).reshape(starts.shape).astype(np.int32)
    entries = np.concatenate(settings.biases) if settings.biases else NO_ENTRIES
    none = repeat(-1, count, np.int32), repeat(NONE, count, np.int32)
    return Edits(*none, fix(ends), entries, standing=True)
