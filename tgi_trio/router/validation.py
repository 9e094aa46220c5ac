"""From a client's parameters to a `Request` the queue can take: checks, defaults, limits.

Checks come in TGI's order and speak TGI's words. What differs on purpose:

- a prompt is tokenised once, and `truncate` keeps its last ids. TGI tokenises again in the shard,
  where truncating keeps the beginning-of-sequence token, so its two prompts may differ;
- `max_new_tokens` is what the length check counts and what is generated, exactly. TGI counts
  `min(max_new_tokens, 1024)` and generates in rounds of that many;
- empty stop strings count towards the limit and are then ignored; in TGI one ends the generation
  after its first token.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ExcessiveLength, PromptTooLong, ValidationError, name_param
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.media.image_prompt import ExpandedPrompt
from tgi_trio.router.number_checks import check_fraction, check_positive, value_or
from tgi_trio.router.request import LineLimits, Request, StoppingCriteria
from tgi_trio.router.text.regexes import compile_regex
from tgi_trio.router.text.text_processor import CheckGrammar, TextProcessor
from tgi_trio.router.text.tokenizer import Tokenizer, TokenizerPool

_SEED_BITS = 64
_MOST_SPARED = 1024
_FLOAT32 = 1.2e-38, 3.4e38  # its normal positive numbers
# Logits divided by it, and then by the least temperature, must be numbers that float32 can hold.
_PENALTIES = 1e-20, 1e20
# Below this the likeliest token wins anyway, and dividing logits by it would overflow float32.
_GREEDY_TEMPERATURE = 1e-6


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


class Validator:
    """Turns prompts and parameters into requests; raises ValidationError in TGI's words."""

    def __init__(
        self,
        pool: TokenizerPool,
        limits: ValidationLimits,
        source: random.Random | None = None,
        check_grammar: CheckGrammar | None = None,
    ) -> None:
        """`source`: of seeds for clients that give none. `check_grammar`: None: no grammars."""
        self._pool = pool
        self._limits = limits
        self._random = source or random.SystemRandom()
        self._check_grammar = check_grammar
        self.reads_tokens = check_grammar is not None  # shards know the tokens' texts then

    @property
    def vocab_size(self) -> int:
        """Return the size of the model's vocabulary."""
        return self._limits.vocab_size

    def check_endpoint(self, parameters: GenerationParameters, *, streaming: bool) -> None:
        """Check what TGI checks before it takes a permit: `best_of` and streaming."""
        best_of, most = parameters.best_of, self._limits.max_best_of
        if streaming:
            if best_of is not None and best_of != 1:
                raise ValidationError("`best_of` != 1 is not supported when streaming tokens")
            if parameters.decoder_input_details:
                raise ValidationError(
                    "`decoder_input_details` == true is not supported when streaming tokens"
                )
        elif best_of is not None and best_of > 1:
            if most == 1:
                raise ValidationError("`best_of` != 1 is not allowed for this endpoint")
            if best_of > most:
                raise ValidationError(f"`best_of` must be > 0 and <= {most}. Given: {best_of}")

    def check(self, parameters: GenerationParameters) -> None:
        """Check everything that needs no prompt; the first problem is raised."""
        _check_sampling(parameters)
        self._check_stopping(parameters)
        self._check_extensions(parameters)

    async def validate(
        self,
        prompt: str | Sequence[int] | NDArray[np.int32] | ExpandedPrompt,
        parameters: GenerationParameters,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str = "",
        name: str = "",
        text_processor: TextProcessor | None = None,
    ) -> Request:
        """Return the request for a prompt given as text, with images or without, or as token ids.

        `add_special_tokens` is for text only: True for plain prompts, False for rendered chats.
        `text_processor`: of the adapter; None: the model's. The other keywords go into the
        `Request` as they are. Raises ValidationError.
        """
        self.check(parameters)
        if len(prompt) == 0:
            raise ValidationError("`inputs` cannot be empty")
        self._check_truncate(parameters.truncate)
        shown = prompt if isinstance(prompt, ExpandedPrompt) else None
        text = prompt.text if isinstance(prompt, ExpandedPrompt) else prompt
        special = add_special_tokens and not (shown is not None and shown.writes_bos)
        tokenizer = None if text_processor is None else text_processor.tokenizer
        ids, length = await self._tokenise(text, special, parameters.truncate, tokenizer)
        max_new_tokens = self._max_new_tokens(length, parameters)
        if len(ids) == 0:  # text that the tokenizer's normalizer removes, without special tokens
            raise ValidationError("`inputs` cannot be empty")
        self.check_ids(ids)
        images = () if shown is None else shown.place(ids, len(ids) == parameters.truncate)
        if parameters.grammar is not None:
            await self.check_grammar(parameters.grammar, text_processor)
        sampling = self._sampling(parameters)
        if text_processor is not None:
            sampling = text_processor.bind(sampling)
        return Request(
            prompt_ids=ids,
            sampling=sampling,
            stopping=StoppingCriteria(
                max_new_tokens=max_new_tokens,
                min_new_tokens=min(parameters.min_new_tokens, max_new_tokens),
                stop=tuple(filter(None, parameters.stop)),
                stop_regex=tuple(map(compile_regex, parameters.stop_regex)),
                stop_ids=frozenset(parameters.stop_ids),
                keep_stop=parameters.keep_stop,
                lines=parameters.lines,
            ),
            priority=priority,
            deadline=deadline,
            cache_salt=cache_salt,
            name=name,
            images=images,
            tokenizer=tokenizer,
        )

    async def count_tokens(self, text: str, tokenizer: Tokenizer | None = None) -> int:
        """Return how many tokens a text has, without special ones; `tokenizer`: None: the model's.

        Raises ValidationError.
        """
        return (await self._pool.encode_prompt(text, False, None, 0, tokenizer))[1]

    async def check_grammar(
        self, grammar: str, text_processor: TextProcessor | None = None
    ) -> None:
        """Raise GrammarError for one that the shard cannot serve, ValidationError without grammars.

        `text_processor`: of the adapter; None: the model's. Verdicts are remembered: asking again
        costs nothing.
        """
        if self._check_grammar is None:
            raise ValidationError("grammar is not supported")
        await self._check_grammar(grammar, None if text_processor is None else text_processor.file)

    def _check_stopping(self, p: GenerationParameters) -> None:
        limits = self._limits
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

    def _check_extensions(self, p: GenerationParameters) -> None:
        """Check what TGI does not know or leaves to its JSON parser."""
        limits = self._limits
        if p.seed is not None and not 0 <= p.seed < 1 << _SEED_BITS:
            raise ValidationError("`seed` must be >= 0 and < 2^64")
        if p.min_new_tokens < 0 or p.min_new_tokens > (p.max_new_tokens or limits.max_total_tokens):
            raise ValidationError(
                "`min_new_tokens` (OpenAI's API: `min_tokens`) must be >= 0 and <= "
                "`max_new_tokens` (`max_tokens`)"
            )
        self._check_no_repeat(p)
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

    def _check_no_repeat(self, p: GenerationParameters) -> None:
        most, size, window = self._limits.max_total_tokens, p.no_repeat_size, p.no_repeat_window
        if not 0 <= size <= most:
            raise ValidationError(
                f"`no_repeat_ngram_size` must be >= 0 and <= {most}. Given: {size}"
            )
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
            if not 0 <= token_id < self._limits.vocab_size:
                raise ValidationError(
                    "`no_repeat_ngram_whitelist` must hold token ids >= 0 and < "
                    f"{self._limits.vocab_size}. Given: {token_id}"
                )

    def _check_truncate(self, truncate: int | None) -> None:
        most = self._limits.max_input_tokens
        if truncate is not None and not 0 < truncate <= most:
            raise ValidationError(
                f"`truncate` must be strictly positive and less than {most}. Given: {truncate}"
            )

    async def _tokenise(
        self,
        prompt: str | Sequence[int] | NDArray[np.int32],
        add_special_tokens: bool,
        truncate: int | None,
        tokenizer: Tokenizer | None,
    ) -> tuple[NDArray[np.int32], int]:
        """Return the ids of the prompt and how many they are; none if too many to be served."""
        if isinstance(prompt, str):
            most = self._limits.max_input_tokens
            encode = self._pool.encode_prompt
            return await encode(prompt, add_special_tokens, truncate, most, tokenizer)
        try:
            cut = truncate is not None and truncate < len(prompt)
            ids = await self._pool.take_ids(prompt[-(truncate or 0) :] if cut else prompt)
        except (OverflowError, ValueError, TypeError) as error:
            raise ValidationError(
                f"`inputs` must hold token ids >= 0 and < {self._limits.vocab_size}"
            ) from error
        return ids, len(ids)

    def check_ids(self, ids: NDArray[np.integer[Any]], name: str = "inputs") -> None:
        """Raise ValidationError for ids that the model has no token for; `name` is their field."""
        lowest, highest = int(ids.min(initial=0)), int(ids.max(initial=0))
        size = self._limits.vocab_size
        if lowest < 0 or highest >= size:
            given = lowest if lowest < 0 else highest
            raise ValidationError(f"`{name}` must hold token ids >= 0 and < {size}. Given: {given}")

    def _max_new_tokens(self, prompt_length: int, parameters: GenerationParameters) -> int:
        """Check the lengths; return what was asked for, or all that fits."""
        total, most = self._limits.max_total_tokens, self._limits.max_input_tokens
        requested, room = parameters.max_new_tokens, max(total - prompt_length, 0)
        if parameters.clip_max_new_tokens and requested is not None:
            requested = min(requested, room)
        new = room if requested is None else requested
        clipped_away = parameters.clip_max_new_tokens and new == 0
        if prompt_length + new > total and not clipped_away:
            text = (
                f"`inputs` tokens + `max_new_tokens` must be <= {total}. "
                f"Given: {prompt_length} `inputs` tokens and {new} `max_new_tokens`"
            )
            if new >= total:  # a shorter prompt would not help
                raise name_param(ValidationError(text), "max_new_tokens")
            fits = min(most, total - new)
            raise PromptTooLong(text, ExcessiveLength(prompt_length, fits, total, requested=new))
        if prompt_length > most or new == 0:
            raise PromptTooLong(
                f"`inputs` must have less than {most} tokens. Given: {prompt_length}",
                ExcessiveLength(prompt_length, min(most, total - 1), total),
            )
        return new

    def _sampling(self, p: GenerationParameters) -> SamplingParameters:
        temperature = 1.0 if p.temperature is None else p.temperature
        sample = p.do_sample or _warps(p)
        return SamplingParameters(
            seed=self._random.getrandbits(_SEED_BITS) if p.seed is None else p.seed,
            sample=sample and temperature >= _GREEDY_TEMPERATURE,
            temperature=max(temperature, _GREEDY_TEMPERATURE),
            top_k=min(p.top_k or 0, self._limits.vocab_size),
            top_p=max(value_or(p.top_p, 1.0), _FLOAT32[0]),
            typical_p=max(value_or(p.typical_p, 1.0), _FLOAT32[0]),
            min_p=value_or(p.min_p, 0.0),
            repetition_penalty=value_or(p.repetition_penalty, 1.0),
            frequency_penalty=value_or(p.frequency_penalty, 0.0),
            presence_penalty=value_or(p.presence_penalty, 0.0),
            absolute_penalties=p.absolute_penalties,
            watermark=p.watermark,
            ignore_eos=p.ignore_eos and p.grammar is None,  # a grammar says where a text ends
            top_n=p.top_n_tokens or 0,
            prompt_logprobs=p.decoder_input_details,
            prompt_top_n=p.prompt_top_n,
            logit_bias=tuple(p.logit_bias.items()),
            no_repeat_size=p.no_repeat_size,
            no_repeat_window=p.no_repeat_window,
            no_repeat_spared=p.no_repeat_spared,
            grammar=p.grammar or "",
            gap_ends=p.gap_ends,
        )


def fan_out(request: Request, count: int) -> list[Request]:
    """Return `count` requests that differ in their seeds alone, for `best_of` and `n`."""
    seeds = ((request.sampling.seed + i) % (1 << _SEED_BITS) for i in range(count))
    return [replace(request, sampling=replace(request.sampling, seed=seed)) for seed in seeds]


def _check_sampling(p: GenerationParameters) -> None:
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


def _warps(p: GenerationParameters) -> bool:
    """Return whether any parameter changes the distribution that tokens are drawn from."""
    return (
        value_or(p.temperature, 1.0) != 1.0
        or p.top_k is not None
        or value_or(p.top_p, 1.0) < 1.0
        or value_or(p.typical_p, 1.0) < 1.0
        or value_or(p.min_p, 0.0) > 0.0
    )


def _check_temperature(p: GenerationParameters) -> None:
    """Raise ValidationError; who accepts 0 has taken it for greedy before."""
    if p.accept_neutral and p.temperature is not None and p.temperature < 0.0:
        raise ValidationError("`temperature` must be >= 0")
    check_positive("temperature", p.temperature, *_FLOAT32)
