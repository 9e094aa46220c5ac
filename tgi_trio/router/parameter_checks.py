"""Checks of what a client asks of a generation: in TGI's order, and in its words.

All raise ValidationError.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.errors import ValidationError
from tgi_trio.router.number_checks import check_fraction, check_positive, value_or
from tgi_trio.router.parameters import (
    FLOAT32,
    SEED_BITS,
    GenerationParameters,
    ValidationLimits,
)

# Logits divided by it, and then by the least temperature, must be numbers that float32 can hold.
_PENALTIES: Final = 1e-20, 1e20
_MOST_SPARED: Final = 1024


def check_sampling(p: GenerationParameters) -> None:
    """Check how tokens are chosen: temperature, truncation, penalties."""
    if (p.best_of or 1) > 1 and not p.sampling:
        raise ValidationError("you must use sampling when `best_of` is > 1")
    _check_temperature(p)
    check_positive("repetition_penalty", p.repetition_penalty, *_PENALTIES)
    if not -2.0 <= value_or(p.frequency_penalty, 0.0) <= 2.0:
        raise ValidationError("`frequency_penalty` must be >= -2.0 and <= 2.0")
    if not -2.0 <= value_or(p.presence_penalty, 0.0) <= 2.0:
        raise ValidationError("`presence_penalty` must be >= -2.0 and <= 2.0")
    check_fraction("top_p", p.top_p, or_one=p.accept_neutral, or_zero=p.accept_neutral)
    check_fraction("typical_p", p.typical_p, or_one=p.accept_neutral)
    if not 0.0 <= value_or(p.min_p, 0.0) <= 1.0:
        raise ValidationError("`min_p` must be >= 0.0 and <= 1.0")
    if p.top_k is not None and p.top_k <= 0:
        if p.accept_neutral:
            raise ValidationError("`top_k` must be > 0, or 0 or -1 for any token")
        raise ValidationError("`top_k` must be strictly positive")


def _check_temperature(p: GenerationParameters) -> None:
    """Raise ValidationError; who accepts 0 has taken it for greedy before."""
    if p.accept_neutral and p.temperature is not None and p.temperature < 0.0:
        raise ValidationError("`temperature` must be >= 0")
    check_positive("temperature", p.temperature, *FLOAT32)


def check_stopping(p: GenerationParameters, limits: ValidationLimits) -> None:
    """Check where a text ends, and what is told of it."""
    if p.max_new_tokens is not None and p.max_new_tokens <= 0:
        raise ValidationError("`max_new_tokens` must be strictly positive")
    most_stops = max(limits.max_stop_sequences, p.stops_allowed)
    if len(p.stop) > most_stops:
        raise ValidationError(
            f"`stop` supports up to {most_stops} stop sequences. Given: {len(p.stop)}"
        )
    if len(p.stop) + len(p.stop_regex) > most_stops:
        raise ValidationError(
            f"`stop` and `stop_regex` support up to {most_stops} stop sequences "
            f"together. Given: {len(p.stop) + len(p.stop_regex)}"
        )
    if p.seed is not None and (p.best_of or 1) > 1:
        raise ValidationError("`seed` must not be set when `best_of` > 1")
    top_n = p.top_n_tokens or 0
    most = max(limits.max_top_n_tokens, p.top_n_allowed)
    if not 0 <= top_n <= most:
        raise ValidationError(f"`top_n_tokens` must be >= 0 and <= {most}. Given: {top_n}")


def check_extensions(p: GenerationParameters, limits: ValidationLimits) -> None:
    """Check what TGI does not know or leaves to its JSON parser."""
    if p.seed is not None and not 0 <= p.seed < 1 << SEED_BITS:
        raise ValidationError("`seed` must be >= 0 and < 2^64")
    if p.min_new_tokens < 0 or p.min_new_tokens > (p.max_new_tokens or limits.max_total_tokens):
        raise ValidationError(
            "`min_new_tokens` (OpenAI's API: `min_tokens`) must be >= 0 and <= "
            "`max_new_tokens` (`max_tokens`)"
        )
    _check_no_repeat(p, limits)
    for token_id in p.stop_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise ValidationError(
                f"`stop_token_ids` must hold token ids >= 0 and < {limits.vocab_size}. "
                f"Given: {token_id}"
            )
    for token_id, bias in p.logit_bias.items():
        if not 0 <= token_id < limits.vocab_size:
            raise ValidationError(
                f"`logit_bias` must name token ids >= 0 and < {limits.vocab_size}. "
                f"Given: {token_id}"
            )
        if not -100.0 <= bias <= 100.0:
            raise ValidationError(
                f"`logit_bias` must be >= -100.0 and <= 100.0. Given: {bias} for {token_id}"
            )


def _check_no_repeat(p: GenerationParameters, limits: ValidationLimits) -> None:
    most, size, window = limits.max_total_tokens, p.no_repeat_size, p.no_repeat_window
    if not 0 <= size <= most:
        raise ValidationError(f"`no_repeat_ngram_size` must be >= 0 and <= {most}. Given: {size}")
    if (window or p.no_repeat_spared) and not size:
        raise ValidationError(
            "`no_repeat_ngram_window` and `no_repeat_ngram_whitelist` are for "
            "`no_repeat_ngram_size`, which is 0 or not given"
        )
    if window and not size <= window < 1 << 31:
        raise ValidationError(
            "`no_repeat_ngram_window` must be 0, for the whole text, or >= "
            f"`no_repeat_ngram_size` and < 2^31. Given: {window}"
        )
    if len(p.no_repeat_spared) > _MOST_SPARED:
        raise ValidationError(
            f"`no_repeat_ngram_whitelist` supports up to {_MOST_SPARED} token ids. "
            f"Given: {len(p.no_repeat_spared)}"
        )
    for token_id in p.no_repeat_spared:
        if not 0 <= token_id < limits.vocab_size:
            raise ValidationError(
                "`no_repeat_ngram_whitelist` must hold token ids >= 0 and < "
                f"{limits.vocab_size}. Given: {token_id}"
            )


def check_truncate(truncate: int | None, limits: ValidationLimits) -> None:
    """Check how many tokens of a prompt are kept."""
    most = limits.max_input_tokens
    if truncate is not None and not 0 < truncate <= most:
        raise ValidationError(
            f"`truncate` must be strictly positive and less than {most}. Given: {truncate}"
        )
