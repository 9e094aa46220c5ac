"""A validator with the limits of TGI's own tests."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.router.text.kinds import served
from tgi_trio.errors import ValidationError
from tgi_trio.router.parameters import GenerationParameters, ValidationLimits
from tgi_trio.router.text.tokenizer import TokenizerPool
from tgi_trio.router.validation import Validator

P = GenerationParameters
TOKENIZER = served("byte_level")
HELLO = "ee"  # tokenised below: two letters are at most two tokens
TEN = [TOKENIZER.token_id(letter) or 0 for letter in "abcdefghij"]


def validator(**changes: Any) -> Validator:
    """The limits of TGI's own tests, with more room for new tokens."""
    limits = ValidationLimits(
        max_input_tokens=5,
        max_total_tokens=106,
        vocab_size=TOKENIZER.vocab_size,
        max_best_of=2,
        max_stop_sequences=3,
        max_top_n_tokens=4,
    )
    pool = TokenizerPool(TOKENIZER, workers=1)
    return Validator(pool, replace(limits, **changes), random.Random(7), check_grammar)


async def check_grammar(grammar: str, tokenizer: Path | None) -> None:
    if grammar == "broken":
        raise ValidationError("grammar is not valid: what it is")
