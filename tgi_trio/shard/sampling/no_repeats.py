"""Tokens that would repeat an n-gram of the text: `no_repeat_ngram_size`.

As `NoRepeatNGramLogitsProcessor` of transformers bars them, over the prompt and what was generated.
A window and tokens that are never barred are those of DeepSeek-OCR's own program. Nothing is kept
between steps, so drafts, preemption and replay change nothing: a text is searched as a whole, which
takes 30 us for 100,000 tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import ShardSequence

Ints = NDArray[np.int64]


def find_repeats(sequence: ShardSequence, vocab_size: int) -> Ints:
    """Return the ids, below `vocab_size`, that may not follow a sequence: int64, ascending.

    They complete an n-gram that lies whole in the last `no_repeat_window` tokens (0: in the text).
    """
    sampling, length = sequence.sampling, sequence.length
    size, window = sampling.no_repeat_size, sampling.no_repeat_window
    ids = sequence.token_ids[:length]
    first = max(0, length - window) if window else 0
    begin = first + size - 1  # the first place that can be the last of an n-gram
    if begin >= length:
        return np.zeros(0, np.int64)
    # Places of tokens that are the last of an n-gram whose others end the text.
    if size > 1:  # most are ruled out by the token before, for which slices are compared
        places = begin + np.flatnonzero(ids[begin - 1 : length - 1] == ids[length - 1])
    else:
        places = np.arange(begin, length)
    for back in range(2, size):
        if not len(places):
            break
        places = places[ids[places - back] == ids[length - back]]
    found: Ints = np.setdiff1d(ids[places], np.array(sampling.no_repeat_spared, np.int64))
    return found[found < vocab_size].astype(np.int64)
