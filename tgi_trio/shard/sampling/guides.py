"""Guided generation in the shard: compiles grammars beside the steps, and computes token masks.

A grammar is compiled in a thread of low priority while its sequence is left out of steps, so that
others are not delayed; llguidance releases the GIL meanwhile. The tokenizer is loaded there too,
but only once the model is ready: for a large vocabulary that holds the GIL for a third of a second.
Compiled grammars are cached; each sequence gets a copy. A sequence's state in its grammar is a
function of its generated tokens, so a replayed sequence continues where it was. Most tokens of a
schema are forced: such runs are known in advance and need no mask. A sequence whose adapter has a
tokenizer or ends of its own gets its masks from a table of its own. No torch in this file.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeAlias

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError
from tgi_trio.grammars.compiler import compile_grammar, raise_error
from tgi_trio.ipc.shard_output import warn
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.machine.garbage import pause_collection
from tgi_trio.shard.machine.give_way import give_way

STATE = "grammar"  # key in Sequence.state

# What a sequence's grammar is compiled with: its tokenizer.json ("": the model's) and its own ends.
Vocabulary: TypeAlias = tuple[str, tuple[int, ...]]
Load: TypeAlias = Callable[[str, tuple[int, ...]], LLTokenizer]

_MODELS: Final[Vocabulary] = ("", ())
_KEPT = 64  # compiled grammars
_TABLES = 8  # tokenizers of adapters that are kept: some tens of MB each
_COMPILING = 2  # at the same time
_NICENESS = 10  # of the compiling threads, added to the steps' own
_TEAM_ROWS = 32  # masks from which on other threads are woken; most masks take 10 us


class Guide:
    """The state of a sequence in its grammar."""

    def __init__(self, compiled: Future[LLMatcher]) -> None:
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._consumed = 0  # generated tokens that the matcher has seen
        self._forced: list[int] = []  # the only possible tokens after these

    @property
    def ready(self) -> bool:
        """Return whether the compilation has ended, with or without an error."""
        return self._compiled.done()

    def find_forced(self, sequence: ShardSequence) -> int | None:
        """Return the only possible next token, if it is known without the matcher."""
        ahead = sequence.length - sequence.prompt_length - self._consumed
        if not 0 <= ahead < len(self._forced):
            return None
        said = sequence.token_ids[sequence.length - ahead : sequence.length].tolist()
        return self._forced[ahead] if said == self._forced[:ahead] else None

    def matcher(self, sequence: ShardSequence) -> LLMatcher:
        """Return the matcher after the sequence's tokens; waits for the compilation.

        The tokens must continue those of the last call, or be a prefix of them. Raises ValueError
        if the grammar could not be compiled, or does not allow them.
        """
        start = sequence.prompt_length + self._consumed
        if self._matcher is not None and sequence.length < start:
            self._take_back(self._matcher, start - sequence.length)
        if self._matcher is None:
            self._matcher, start = self._compiled.result().deep_copy(), sequence.prompt_length
        if sequence.length > start:
            self._matcher.consume_tokens(sequence.token_ids[start : sequence.length].tolist())
        self._consumed, self._forced = sequence.length - sequence.prompt_length, []
        raise_error(self._matcher)
        return self._matcher

    def _take_back(self, matcher: LLMatcher, count: int) -> None:
        """Roll tokens back, or begin anew: llguidance cannot if a grammar counts tokens."""
        if not matcher.rollback(count):
            self._matcher = None

    def rewind(self, sequence: ShardSequence) -> None:
        """Roll back tokens beyond the sequence's; they were drafts that the grammar allows."""
        if self._consumed > sequence.length - sequence.prompt_length:
            self.matcher(sequence)

    def look_ahead(self, matcher: LLMatcher) -> None:
        """Store the forced tokens, after a mask has shown that only one token is possible."""
        self._forced = matcher.compute_ff_tokens()


class Grammars:
    """Compiles grammars and computes masks; keeps a `Guide` in each sequence's state."""

    def __init__(self, load: Load) -> None:
        """`load`: called in a thread with a `Vocabulary`, by `start` or for its first grammar.

        If it raises ModelLoadError, only sequences with a grammar fail, with its message; it is
        called again for the next grammar, as files may be put back.
        """
        self._load = load
        self._tokenizers: OrderedDict[Vocabulary, Future[LLTokenizer]] = OrderedDict()
        self._compiled: OrderedDict[tuple[Vocabulary, str], Future[LLMatcher]] = OrderedDict()
        # Threads inherit the affinity of their creator, which may be pinned to the first core.
        self._pool = ThreadPoolExecutor(
            _COMPILING,
            "grammar",
            initializer=give_way,
            initargs=(os.sched_getaffinity(0), _NICENESS),
        )
        self._executor = LLExecutor()

    def start(self) -> None:
        """See `GrammarMasks`."""
        self._loading(_MODELS)

    def prepare(self, sequence: ShardSequence) -> bool:
        """Have the sequence's grammar compiled; return whether the compilation has ended.

        The same of the tokenizer, where `pieces` will be asked for.
        """
        if sequence.sampling.grammar and not self._guide(sequence).ready:
            return False
        return not sequence.sampling.gap_ends or self._loading(_MODELS).done()

    def pieces(self, ids: NDArray[np.int64]) -> list[bytes]:
        """See `GrammarMasks`."""
        tokenizer = self._loading(_MODELS).result()
        return [
            b"" if tokenizer.is_special_token(each) else tokenizer.decode_bytes([each])
            for each in ids.tolist()
        ]

    def allowed(self, sequences: list[ShardSequence]) -> tuple[NDArray[np.uint8], dict[int, str]]:
        """Return which tokens may follow each sequence, and the faults of sequences without a mask.

        uint8 [S, bytes], as wide as the widest tokenizer: bit i % 8 of byte i // 8, lowest first,
        is 1 if token i may follow; rows without a mask are 0. Faults are by place.
        """
        widths, faults = self._widths(sequences)
        masks = np.zeros((len(sequences), max(widths.values(), default=0)), np.uint8)
        asked: list[tuple[Guide, LLMatcher, int]] = []
        for place, sequence in enumerate(sequences):
            if place in faults:
                continue
            guide = self._guide(sequence)
            forced = guide.find_forced(sequence)
            if forced is not None:
                masks[place, forced >> 3] = 1 << (forced & 7)
                continue
            try:
                asked.append((guide, guide.matcher(sequence), place))
            except ValueError as error:
                faults[place] = str(error)
        self._compute([(matcher, place) for _, matcher, place in asked], masks, widths)
        for guide, matcher, place in asked:
            if matcher.is_error():
                faults[place] = matcher.get_error()
            elif _has_one_bit(masks[place]):
                guide.look_ahead(matcher)
        return masks, faults

    def _compute(
        self,
        jobs: list[tuple[LLMatcher, int]],
        masks: NDArray[np.uint8],
        widths: Mapping[int, int],
    ) -> None:
        """Write the masks of matchers into their rows, of which each has a width, in bytes."""
        start, size = masks.ctypes.data, masks.shape[1]
        if len(jobs) >= _TEAM_ROWS and all(widths[place] == size for _, place in jobs):
            self._executor.unsafe_compute_mask_ptr(jobs, start, size, len(masks))
            return
        for matcher, place in jobs:
            matcher.unsafe_compute_mask_ptr(start + place * size, widths[place])

    def _widths(self, sequences: list[ShardSequence]) -> tuple[dict[int, int], dict[int, str]]:
        """Return the bytes of a mask by place, and faults of those whose tokenizer cannot be used.

        Waits for the tokenizers.
        """
        widths: dict[int, int] = {}
        faults: dict[int, str] = {}
        for place, sequence in enumerate(sequences):
            try:
                tokenizer = self._loading(_vocabulary_of(sequence)).result()
                widths[place] = 4 * -(-tokenizer.vocab_size // 32)
            except ValueError as error:
                faults[place] = str(error)
        return widths, faults

    def rewind(self, sequence: ShardSequence) -> None:
        """See `GrammarMasks`."""
        self._guide(sequence).rewind(sequence)

    def drop(self, sequence: ShardSequence) -> None:
        """Drop the sequence's state."""
        sequence.state.pop(STATE, None)

    def _guide(self, sequence: ShardSequence) -> Guide:
        guide = sequence.state.get(STATE)
        if not isinstance(guide, Guide):
            compiled = self._compile(_vocabulary_of(sequence), sequence.sampling.grammar)
            guide = sequence.state[STATE] = Guide(compiled)
        return guide

    def _loading(self, vocabulary: Vocabulary) -> Future[LLTokenizer]:
        """Return a tokenizer, loaded or still loading; others than the model's may be dropped."""
        found = self._tokenizers.pop(vocabulary, None)
        if found is None:
            others = [each for each in self._tokenizers if each != _MODELS]
            if len(others) >= _TABLES and vocabulary != _MODELS:
                del self._tokenizers[others[0]]
            found = self._pool.submit(_load, self._load, vocabulary)
        self._tokenizers[vocabulary] = found
        return found

    def _compile(self, vocabulary: Vocabulary, text: str) -> Future[LLMatcher]:
        """Return the compilation of a grammar, running or finished."""
        loading = self._tokenizers.get(vocabulary)
        if loading is not None and _has_failed(loading):
            del self._tokenizers[vocabulary]
            for key in [key for key in self._compiled if key[0] == vocabulary]:
                del self._compiled[key]
        future = self._compiled.pop((vocabulary, text), None)
        if future is None:
            # The router has checked the grammar before, in as many processes, each as slow as this
            # thread: that keeps the pool's queue short.
            future = self._pool.submit(_compile, text, self._loading(vocabulary))
        self._compiled[vocabulary, text] = future
        if len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return future


def _vocabulary_of(sequence: ShardSequence) -> Vocabulary:
    return sequence.sampling.tokenizer, sequence.sampling.ends


def _has_failed(future: Future[LLTokenizer]) -> bool:
    return future.done() and future.exception() is not None


def _load(load: Load, vocabulary: Vocabulary) -> LLTokenizer:
    """Return the tokenizer; logs a warning and raises ValueError if it cannot be used."""
    try:
        with pause_collection():
            return load(*vocabulary)
    except ModelLoadError as error:
        warn(f"requests with a grammar will fail: {error}")
        raise ValueError(str(error)) from error


def _compile(text: str, tokenizer: Future[LLTokenizer]) -> LLMatcher:
    """Return what `compile_grammar` does; the tokenizer is read by a thread that began before."""
    return compile_grammar(text, tokenizer.result())


def _has_one_bit(mask: NDArray[np.uint8]) -> bool:
    words = mask.view(np.uint32)
    if np.count_nonzero(words) != 1:
        return False
    return int(words[words.argmax()]).bit_count() == 1
