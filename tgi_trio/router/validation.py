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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ExcessiveLength, PromptTooLong, ValidationError, name_param
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.media.image_prompt import ExpandedPrompt
from tgi_trio.router.number_checks import value_or
from tgi_trio.router.parameter_checks import (
    check_extensions,
    check_sampling,
    check_stopping,
    check_truncate,
)
from tgi_trio.router.parameters import (
    FLOAT32,
    SEED_BITS,
    GenerationParameters,
    ValidationLimits,
    warps,
)
from tgi_trio.router.request import Request, StoppingCriteria
from tgi_trio.router.text.regexes import compile_regex
from tgi_trio.router.text.text_processor import CheckGrammar, TextProcessor
from tgi_trio.router.text.tokenizer import Tokenizer, TokenizerPool

# Below this the likeliest token wins anyway, and dividing logits by it would overflow float32.
_GREEDY_TEMPERATURE = 1e-6


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
        check_sampling(parameters)
        check_stopping(parameters, self._limits)
        check_extensions(parameters, self._limits)

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
        check_truncate(parameters.truncate, self._limits)
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
        sample = p.do_sample or warps(p)
        return SamplingParameters(
            seed=self._random.getrandbits(SEED_BITS) if p.seed is None else p.seed,
            sample=sample and temperature >= _GREEDY_TEMPERATURE,
            temperature=max(temperature, _GREEDY_TEMPERATURE),
            top_k=min(p.top_k or 0, self._limits.vocab_size),
            top_p=max(value_or(p.top_p, 1.0), FLOAT32[0]),
            typical_p=max(value_or(p.typical_p, 1.0), FLOAT32[0]),
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
    seeds = ((request.sampling.seed + i) % (1 << SEED_BITS) for i in range(count))
    return [replace(request, sampling=replace(request.sampling, seed=seed)) for seed in seeds]
