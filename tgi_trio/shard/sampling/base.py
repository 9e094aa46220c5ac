"""The common part of samplers: rows' settings, logits processors, and the best candidates.

No torch in this file. The samplers are `torch_sampler.Sampler` and
`cpu_sampler.CpuSampler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.alternatives import Listed
from tgi_trio.shard.contract import Choices, ShardSequence
from tgi_trio.shard.sampling import logits_processors as processors
from tgi_trio.shard.sampling.gaps import Gaps
from tgi_trio.shard.sampling.logits_processors import Scores
from tgi_trio.shard.sampling.no_repeats import find_repeats
from tgi_trio.shard.sampling.philox import uniform
from tgi_trio.shard.sampling.truncation import Cuts, Floats, Ints, could_settle, truncate

# Numbers of a row's best tokens to try before the whole row: the first nearly always suffices.
WIDTHS = (64, 512)
MOST_TIES = 64  # alternatives listed when more tie with the last requested one
AHEAD = "rows ahead"  # key in ShardSequence.state: the sequence with its drafts known
_MOST_KEPT = 16  # lists of rows whose settings are kept
NO_PIECES = "a gap cannot be filled: this shard was started without a tokenizer"


Draw: TypeAlias = Callable[[NDArray[np.uint64], NDArray[np.uint64]], Floats]


class RowSampler(Protocol):
    """What a runner needs of a sampler."""

    def choose(self, logits: Scores, rows: list[ShardSequence]) -> Choices:
        """Choose the next token of every row, one each but for rows that fail."""
        ...

    def prepare(self, sequence: ShardSequence | None) -> bool: ...

    def drop(self, sequence: ShardSequence) -> None: ...


@dataclass(frozen=True)
class SamplingSettings:
    """The settings of a list of rows; kept while the list stays the same, as in most steps."""

    rows: list[ShardSequence]
    vocab_size: int
    seeds: NDArray[np.uint64]  # [R]
    sample: NDArray[np.bool_]  # [R]
    draws: bool  # whether any row samples
    top_n: Ints  # [R]
    temperature: NDArray[np.float32] | None  # [R, 1]; None: all are 1
    floors: tuple[Ints, Floats]  # rows with min-p alone, and its logarithm
    open: Ints  # rows without another truncation
    cut: Ints  # rows with one
    cuts: Cuts  # of these rows
    watermark: list[tuple[int, ShardSequence]]
    repetition: list[tuple[int, ShardSequence]]
    counted: list[tuple[int, ShardSequence]]
    biased: list[tuple[int, ShardSequence]]
    minimum: list[tuple[int, ShardSequence]]
    unrepeated: list[tuple[int, ShardSequence]]  # in which no n-gram comes again
    grammar: list[tuple[int, ShardSequence]]
    gaps: dict[int, ShardSequence]  # rows that fill gaps

    @classmethod
    def of(cls, rows: list[ShardSequence], vocab_size: int) -> SamplingSettings:
        sampling = [row.sampling for row in rows]
        temperature = np.array([s.temperature for s in sampling], np.float32)
        every = Cuts.of(sampling, vocab_size)
        fills = np.array([bool(s.gap_ends) for s in sampling], np.bool_)
        ordered = (every.top_k > 0) | (every.top_p < 1) | (every.typical_p < 1) | fills
        cut, floored = np.flatnonzero(ordered), np.flatnonzero(~ordered & (every.min_p > 0))
        numbered = list(enumerate(rows))
        return cls(
            rows=list(rows),
            vocab_size=vocab_size,
            seeds=np.array([s.seed for s in sampling], np.uint64),
            sample=np.array([s.sample for s in sampling], np.bool_),
            draws=any(s.sample for s in sampling),
            top_n=np.array([s.top_n for s in sampling], np.int64),
            temperature=None if (temperature == 1).all() else temperature[:, None],
            floors=(floored, np.log(every.min_p[floored])),
            open=np.flatnonzero(~ordered),
            cut=cut,
            cuts=every[cut],
            watermark=[(i, r) for i, r in numbered if r.sampling.watermark],
            repetition=[(i, r) for i, r in numbered if r.sampling.repetition_penalty != 1],
            counted=[
                (i, r)
                for i, r in numbered
                if r.sampling.frequency_penalty or r.sampling.presence_penalty
            ],
            biased=[(i, r) for i, r in numbered if r.sampling.logit_bias],
            minimum=[
                (i, r) for i, r in numbered if r.min_remaining > 0 and not r.sampling.ignore_eos
            ],
            unrepeated=[(i, r) for i, r in numbered if r.sampling.no_repeat_size],
            grammar=[(i, r) for i, r in numbered if r.sampling.grammar],
            gaps={i: r for i, r in numbered if r.sampling.gap_ends},
        )


@dataclass
class Choice:
    """The outcome per row; each method fills in the rows that it decides."""

    token_ids: Ints  # [R]
    logprobs: Floats  # [R]
    tops: list[list[tuple[int, float]]]  # [R]

    @classmethod
    def of(cls, count: int) -> Choice:
        """Return an empty outcome for `count` rows."""
        return cls(np.zeros(count, np.int64), np.zeros(count), [[] for _ in range(count)])

    def choices(self, faults: dict[int, str]) -> Choices:
        """Return every row's token; rows in `faults` get none."""
        counts = np.ones(len(self.token_ids), np.int64)
        token_ids, logprobs = self.token_ids, self.logprobs
        if faults:
            counts[list(faults)] = 0
            token_ids, logprobs = token_ids[counts > 0], logprobs[counts > 0]
        tops = None
        if any(self.tops):
            tops = Listed.of([top for row, top in enumerate(self.tops) if row not in faults])
        return Choices(counts, token_ids, logprobs, tops, faults)


class SamplerBase:
    """A sampler's state: the rows' settings here, a row's own in `sequence.state["sampler"]`."""

    def __init__(
        self,
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        permutation: processors.Permutation,
        grammars: processors.GrammarMasks | None = None,
        watermark: processors.Watermark | None = None,
    ) -> None:
        """Without `grammars`, rows with one fail; `watermark` is for rows that request it."""
        self._vocab_size = vocab_size
        self._eos_ids = np.array(sorted(eos_ids), np.int64)
        self.grammars = grammars
        self._permutation = permutation
        self.watermark = watermark or processors.Watermark()
        self._rows: list[ShardSequence] = []  # of the last call
        self._blocks: list[SamplingSettings] = []  # their settings
        # The same for earlier calls: with drafts, the number of rows changes between steps.
        self._kept: dict[tuple[ShardSequence, ...], list[SamplingSettings]] = {}

    def prepare(self, sequence: ShardSequence | None) -> bool:
        """Prepare what the sequence's choices need; return whether it is ready.

        None: prepare what any sequence may need.
        """
        if self.grammars is None:
            return True
        if sequence is None:
            self.grammars.start()
            return True
        if not (sequence.sampling.grammar or sequence.sampling.gap_ends):
            return True
        return self.grammars.prepare(sequence)

    def drop(self, sequence: ShardSequence) -> None:
        """Drop the sequence's state."""
        sequence.state.pop(processors.STATE, None)
        sequence.state.pop(AHEAD, None)
        if self.grammars is not None:
            self.grammars.drop(sequence)
        self._rows, self._blocks = [], []
        self._kept.clear()

    def _settings(self, rows: list[ShardSequence], size: int) -> list[SamplingSettings]:
        """Return the rows' settings, `size` rows at a time."""
        if self._rows == rows:
            return self._blocks
        key = tuple(rows)
        blocks = self._kept.get(key)
        if blocks is None:
            starts = range(0, len(rows), size)
            blocks = [SamplingSettings.of(rows[i : i + size], self._vocab_size) for i in starts]
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = blocks
        self._rows, self._blocks = list(rows), blocks
        return blocks

    def _process(self, scores: processors.Scores, settings: SamplingSettings) -> dict[int, str]:
        """Apply all processors before the grammar masks; return faults by row."""
        size = self._vocab_size
        faults: dict[int, str] = {}
        if settings.watermark:
            processors.watermark(
                scores, settings.watermark, self.watermark, size, self._permutation
            )
        if settings.repetition:
            processors.repetition(scores, settings.repetition)
        if settings.counted:
            processors.frequency_and_presence(scores, settings.counted)
        if settings.biased:
            faults |= processors.logit_bias(scores, settings.biased, size)
        for row, sequence in settings.unrepeated:
            if len(ids := find_repeats(sequence, size)):
                processors.forbid(scores, [row], ids)
        early = [each for each in settings.minimum if each[1].min_remaining > 0]
        if early:
            processors.forbid(scores, [row for row, _ in early], self._eos_ids)
        for row, sequence in early:
            if ends := [end for end in sequence.sampling.ends if end < size]:
                processors.forbid(scores, [row], np.array(ends, np.int64))
        return faults

    def _masks(
        self, settings: SamplingSettings, width: int, faults: dict[int, str]
    ) -> NDArray[np.uint8] | None:
        """Return the grammars' masks, for at least `width` tokens; None without a grammar.

        Adds rows whose masks could not be computed to `faults`.
        """
        if not settings.grammar:
            return None
        allowed, without = processors.masks(settings.grammar, self.grammars, width)
        faults |= without
        return allowed

    def _gaps(self, settings: SamplingSettings, faults: dict[int, str]) -> Gaps | None:
        """Return how gaps are filled; None without any.

        Adds rows that fill some to `faults`, where the texts of tokens are not known.
        """
        if not settings.gaps:
            return None
        if self.grammars is None:
            why = NO_PIECES
        else:
            try:
                self.grammars.pieces(np.zeros(0, np.int64))
            except ValueError as error:
                why = str(error)
            else:
                return Gaps(frozenset(self._eos_ids.tolist()), self.grammars.pieces)
        faults |= dict.fromkeys(settings.gaps, why)
        return None


def uniforms(settings: SamplingSettings, draw: Draw = uniform) -> Floats:
    """Return every row's random number, a function of its seed and position: float64 [R].

    `draw(seeds, positions)` returns the numbers; both are uint64 [R]. If no row samples, all are 0.
    """
    if not settings.draws:
        return np.zeros(len(settings.rows))
    positions = np.array([row.length for row in settings.rows], np.uint64)
    return draw(settings.seeds, positions)


def choose_among_best(
    find: Callable[[Ints, int], tuple[Floats, Ints]],
    totals: Floats,
    entropies: Floats,
    settings: SamplingSettings,
    numbers: Floats,
    choice: Choice,
    gaps: Gaps | None = None,
) -> Ints:
    """Choose for rows with a truncation, if their best candidates suffice.

    `find(places, width)` returns scores and ids [places, width] of the best tokens of the rows
    `settings.cut[places]`, best first. `totals` and `entropies` [cut] are of those rows, `numbers`
    [R] every row's random number; `gaps`: for rows that fill some. Returns the places of rows for
    which candidates do not suffice.
    """
    todo = np.arange(len(settings.cut))
    decided = np.zeros(len(settings.cut), np.bool_)
    for width in WIDTHS:
        if len(todo) == 0:
            break
        best, ids = find(todo, width)
        whole = width >= settings.vocab_size
        kept = truncate(best, totals[todo], entropies[todo], settings.cuts[todo], whole=whole)
        rows = settings.cut[todo]
        places = np.where(settings.sample[rows], kept.draw(numbers[rows]), kept.first())
        logprobs = best - np.log(kept.total)[:, None]
        settled = kept.settled
        if settings.gaps and width == max(WIDTHS):
            # Their top-k is no larger. Beyond are only tokens as likely as the last one.
            settled = settled | np.isin(rows, list(settings.gaps))
        for i in np.flatnonzero(settled).tolist():
            row, place = int(rows[i]), int(places[i])
            own = np.flatnonzero(kept.keep[i])
            if gaps is not None and row in settings.gaps and len(own):  # else it has a fault
                choice.token_ids[row], choice.logprobs[row] = gaps.choose(
                    settings.gaps[row], best[i, own], ids[i, own], float(numbers[row])
                )
                continue
            choice.token_ids[row] = ids[i, place]
            choice.logprobs[row] = logprobs[i, place]
            if settings.top_n[row]:
                choice.tops[row] = alternatives(
                    ids[i], logprobs[i], kept.keep[i], int(settings.top_n[row])
                )
        decided[todo[settled]] = True
        hopeful = could_settle(best, totals[todo], settings.cuts[todo], max(WIDTHS))
        todo = todo[~settled & hopeful]
    return np.flatnonzero(~decided)


def why_not(best: float, sequence: ShardSequence) -> str:
    if best == -np.inf:
        return (
            "no token can follow: grammar, min_tokens, logit_bias and no_repeat_ngram_size "
            "forbid all"
        )
    value = "NaN" if np.isnan(best) else "infinity"
    return f"the model's logits contain {value} at position {sequence.length - 1}"


def alternatives(
    ids: Ints, logprobs: Floats, keep: NDArray[np.bool_], count: int
) -> list[tuple[int, float]]:
    """Return the `count` best kept tokens and all that tie with the last of them, best first."""
    places = np.flatnonzero(keep)
    if len(places) > count:
        places = places[logprobs[places] >= logprobs[places[count - 1]]]
    return list(zip(ids[places].tolist(), logprobs[places].tolist(), strict=True))
