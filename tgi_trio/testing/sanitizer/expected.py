"""What looks like a defect and is none."""

from __future__ import annotations

from typing import Final

from tgi_trio.testing.sanitizer.findings import Expected

_GUESSES: Final = "each of a row's drafts leaves its token; a step with drafts is read by the host"
_LISTS: Final = "lists of pairs are in any order: what is computed of a pair is alike everywhere"
_STORED: Final = "what a copy has read is used by the thread that stores alone"
_TINY: Final = "vocabularies of tests are smaller than threads are many"

EXPECTED: Final = (
    Expected("order", "ask_router", "pairs", _LISTS),
    Expected("order", "route_tokens", "pairs", _LISTS),
    Expected("race", "survey_scores", "chosen", _GUESSES),
    Expected("order", "survey_scores", "chosen", _GUESSES),
    Expected("race", "choose_tokens", "chosen", _GUESSES),
    Expected("order", "choose_tokens", "chosen", _GUESSES),
    Expected("copies", "count_tokens", "counts", _STORED),
    Expected("copies", "survey_scores", "scores", _TINY),
    Expected("copies", "choose_tokens", "scores", _TINY),
)

# Rows of a recording that are missing read and write slot 0 of states, as fresh ones; tokens that
# are missing write to slot 0 of the cache.
NULL_SLOTS: Final = frozenset({"states", "tails", "key", "value", "keys"})
