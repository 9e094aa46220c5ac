"""What a client asks of a generation, and what it may ask for at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tgi_trio.router.number_checks import value_or
from tgi_trio.router.request import LineLimits

SEED_BITS: Final = 64
FLOAT32: Final = 1.2e-38, 3.4e38  # its normal positive numbers


@dataclass(frozen=True, slots=True)
class GenerationParameters:
    """What a client asks of a generation; None stands for "not given"."""

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    min_p: float | None = None
    do_sample: bool = False
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    truncate: int | None = None
    watermark: bool = False
    seed: int | None = None
    top_n_tokens: int | None = None
    decoder_input_details: bool = False
    prompt_top_n: int = 0  # alternatives per prompt token, as a part of those details
    grammar: str | None = None  # as the shard reads it
    adapter_id: str | None = None  # `validate_request` looks it up
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ignore_eos: bool = False
    no_repeat_size: int = 0  # `no_repeat_ngram_size` and what belongs to it
    no_repeat_window: int = 0
    no_repeat_spared: tuple[int, ...] = ()
    lines: LineLimits | None = None
    gap_ends: tuple[int, ...] = ()  # of a gap whose tokens the shard chooses by its own rules
    # Set by the API family, not by the client:
    keep_stop: bool = True  # OpenAI: False
    absolute_penalties: bool = False  # OpenAI's formula for frequency and presence
    accept_neutral: bool = False  # OpenAI: values without effect, temperature and top_p 0; not TGI
    top_n_allowed: int = 0  # OpenAI promises 20, whatever --max-top-n-tokens says
    stops_allowed: int = 0  # whatever --max-stop-sequences says
    clip_max_new_tokens: bool = False  # what there is no room for is not asked for

    @property
    def sampling(self) -> bool:
        """Return whether tokens are drawn at random, as TGI decides it for `best_of`."""
        warpers = (self.temperature, self.top_k, self.top_p, self.typical_p, self.min_p)
        return self.do_sample or any(value is not None for value in warpers)


@dataclass(frozen=True, slots=True)
class ValidationLimits:
    """What one request may ask for; each field is named after its flag."""

    max_input_tokens: int
    max_total_tokens: int
    vocab_size: int  # of the model: ids that may be sent to the shard
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5


def warps(p: GenerationParameters) -> bool:
    """Return whether any parameter changes the distribution that tokens are drawn from."""
    return (
        value_or(p.temperature, 1.0) != 1.0
        or p.top_k is not None
        or value_or(p.top_p, 1.0) < 1.0
        or value_or(p.typical_p, 1.0) < 1.0
        or value_or(p.min_p, 0.0) > 0.0
    )
