"""An engine without a shard: every generation says what `answer` makes of its prompt.

Tokenizer, validator, text handling, streams and metrics are the real ones; only scheduling and
computing are missing. A test either lets `run` make steps, or makes them itself with `step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path

import tokenizers
import trio

from tgi_trio.errors import GenerationError, Overloaded
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.adapters.text_processors import TextProcessors
from tgi_trio.router.engine.stream import TokenStream
from tgi_trio.router.http.engine_api import ModelCard, ServedLimits
from tgi_trio.router.media.media_reader import MediaReader
from tgi_trio.router.parameters import ValidationLimits
from tgi_trio.router.request import FinishReason, Outcome, Request, Timings, Token
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.text.answer_text import output_text
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.output import OutputText
from tgi_trio.router.text.text_processor import ModelTextProcessor, TextProcessor
from tgi_trio.router.text.thoughts.derive import Thoughts, ThoughtSettings, derive_thoughts
from tgi_trio.router.text.tokenizer import Tokenizer, TokenizerPool
from tgi_trio.router.text.tokenizer_files import TokenizerConfig
from tgi_trio.router.text.tools.probe import CallStyle, find_call_style
from tgi_trio.router.validation import Validator

TEMPLATE = (
    "{% set newline = '\\n' %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{{ '' if loop.last else newline }}{% endfor %}"
    "{{ newline + '<assistant>' if add_generation_prompt }}"
)


# Tokens by which a model fills gaps, and one that begins another file.
GAP_MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")


def byte_tokenizer(special: tuple[str, ...] = ()) -> Tokenizer:
    """Return a tokenizer with a token per byte; `<s>` (0) is put in front, `</s>` (1) ends.

    `special` are more tokens that have no part in a text.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet, *special])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", *special])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return Tokenizer(
        backend,
        TokenizerConfig({"bos_token": "<s>", "eos_token": "</s>"}, (), {}),
    )


# An engine has these from its start; here they are found when they are first asked for.


@cache
def plain_template() -> ChatTemplate:
    """Return `TEMPLATE`, compiled."""
    return ChatTemplate({"default": TEMPLATE}, {})


@lru_cache(maxsize=8)
def thoughts(template: ChatTemplate, tokenizer: Tokenizer) -> Thoughts | None:
    """Return how a model of this template and tokenizer thinks."""
    return derive_thoughts(template, None, tokenizer.added_tokens)


@lru_cache(maxsize=8)
def call_style(template: ChatTemplate | None, tokenizer: Tokenizer) -> CallStyle:
    """Return how a model of this template and tokenizer writes calls."""
    return find_call_style(template, tokenizer.added_tokens)


async def any_grammar(grammar: str, tokenizer: Path | None = None) -> None:
    """Accept every grammar: what is generated here follows none."""
    await trio.lowlevel.checkpoint()


class FakeEngine:
    """See the module's docstring; satisfies `engine_api.EngineApi`."""

    def __init__(
        self,
        answer: Callable[[str], str] = lambda prompt: "Hello world",
        limits: ServedLimits | None = None,
        model: ModelCard | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.answer = answer
        self.limits = limits or ServedLimits()
        self.model = model or ModelCard("test/model", sha="abc", aliases=("nick",))
        self.tokenizer = tokenizer or byte_tokenizer()
        self.chat_template: ChatTemplate | None = plain_template()
        self.validator = Validator(
            TokenizerPool(self.tokenizer, 1),
            ValidationLimits(
                max_input_tokens=self.limits.max_input_tokens,
                max_total_tokens=self.limits.max_total_tokens,
                vocab_size=self.tokenizer.vocab_size,
                max_top_n_tokens=self.limits.max_top_n_tokens,
            ),
            check_grammar=any_grammar,
        )
        self.metrics = Metrics()
        self.adapters = AdapterRegistry()
        self.own_text_processors: TextProcessors | None = None
        self.images: MediaReader | None = None
        self.healthy = (True, "")
        self.living = (True, "")
        self.submitted: list[Request] = []
        self.prompts: list[str] = []  # of what was submitted, without special tokens
        self.cached: dict[int, int] = {}  # cached tokens of a prompt, by its place in `submitted`
        self.permits = 0
        self.live: dict[int, TokenStream] = {}
        self.left: list[TokenStream] = []  # aborted before their end
        self.fail_after: int | None = None  # tokens, after which every generation fails
        self.tokens_per_step = 1
        self.tops: Callable[[int], list[tuple[int, float]]] = lambda id: [(id, -0.5), (2, -1.25)]
        self._ids: dict[int, Iterator[int]] = {}
        self._work = trio.Event()

    @property
    def thoughts(self) -> Thoughts | None:
        """What the template and the tokenizer say; a test may replace either."""
        return None if self.chat_template is None else thoughts(self.chat_template, self.tokenizer)

    @property
    def call_style(self) -> CallStyle:
        """The same, for calls."""
        return call_style(self.chat_template, self.tokenizer)

    @property
    def text_processors(self) -> TextProcessors:
        """The text processors of adapters, which have the model's unless a test says otherwise."""
        if self.own_text_processors is not None:
            return self.own_text_processors
        model = TextProcessor(self.tokenizer, self.chat_template, self.thoughts, self.call_style)
        return TextProcessors(ModelTextProcessor(model, frozenset(), {}, None, ThoughtSettings()))

    # ---- the Engine protocol -------------------------------------------------------------------

    @contextmanager
    def permit(self, count: int = 1) -> Iterator[None]:
        if self.permits + count > self.limits.max_concurrent_requests:
            raise Overloaded(retry_after=2.0)
        self.permits += count
        try:
            yield
        finally:
            self.permits -= count

    def submit(
        self, request: Request, timings: Timings | None = None, output: OutputText | None = None
    ) -> TokenStream:
        now = trio.current_time()
        timings = timings or Timings(received=now)
        timings.queued = timings.started = now
        self.submitted.append(request)
        output = output or output_text(self.tokenizer, request)
        id = len(self.submitted)
        stream = TokenStream(id, request, output, timings, self.leave)
        prompt = self.tokenizer.decode(request.prompt_ids)
        self.prompts.append(prompt)
        ids = [*self.tokenizer.encode_ids(self.answer(prompt), False).tolist(), 1]
        self._ids[id] = iter(ids[len(request.emitted) :])
        self.live[id] = stream
        self._work.set()
        return stream

    def health(self) -> tuple[bool, str]:
        return self.healthy

    def load(self) -> tuple[int, int]:
        return len(self.live), 8

    def alive(self) -> tuple[bool, str]:
        return self.living

    def leave(self, stream: TokenStream) -> None:
        """Called by the stream when its context is left."""
        if self.live.pop(stream.id, None) is not None:
            self.left.append(stream)
            stream.cancel()

    # ---- generation ----------------------------------------------------------------------------

    async def run(self, interval: float = 0.0) -> None:
        """Make steps while there is work."""
        while True:
            await self._work.wait()
            while self.live:
                await trio.sleep(interval)
                self.step()
            self._work = trio.Event()

    def step(self) -> None:
        """Give every generation its next tokens."""
        for stream in list(self.live.values()):
            tokens = []
            for _ in range(self.tokens_per_step):
                tokens.append(self.next_token(stream))
                end = self._end(stream, stream.generated + len(tokens), tokens[-1].id)
                if end is not None:
                    break
            timings, now = stream.timings, trio.current_time()
            if timings.first_token is None:
                timings.first_token = now
            if end is not None:
                timings.finished = now
                del self.live[stream.id]
            stream.deliver(tokens, end)

    def next_token(self, stream: TokenStream) -> Token:
        """Return what a generation says next."""
        id = next(self._ids[stream.id])
        sampling = stream.request.sampling
        tops = self.tops(id)[: sampling.top_n]
        return stream.output.push(id, -0.5, tops, id == 1)

    def _end(
        self, stream: TokenStream, generated: int, id: int
    ) -> Outcome | GenerationError | None:
        stopping = stream.request.stopping
        if self.fail_after is not None and generated >= self.fail_after:
            return GenerationError("the shard gave up")
        reason = None
        if generated >= stopping.max_new_tokens:
            reason = FinishReason.LENGTH
        elif id == 1:
            reason = FinishReason.EOS_TOKEN
        elif stream.output.stopped:
            reason = FinishReason.STOP_SEQUENCE
        if reason is None:
            return None
        matched = None if reason is FinishReason.LENGTH else stream.output.matched
        tail = stream.output.finish()
        request = stream.request
        logprobs, tops = told_of_prompt(request)
        return Outcome(
            reason=reason,
            text=stream.output.generated_text,
            generated_tokens=generated,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=self.cached.get(stream.id - 1, 0),
            seed=request.sampling.seed if request.sampling.sample else None,
            tail=tail,
            matched=id if reason is FinishReason.EOS_TOKEN else matched,
            prompt_logprobs=logprobs,
            prompt_tops=tops,
            answer=stream.output.answer_end,
        )


def told_of_prompt(
    request: Request,
) -> tuple[tuple[float, ...], tuple[tuple[tuple[int, float], ...], ...]]:
    """Return logprobs of a prompt's tokens and what else was likely, if that was asked for."""
    sampling, more = request.sampling, len(request.prompt_ids) - 1
    if not sampling.prompt_logprobs:
        return (), ()
    best = tuple((34 + n, -1.0 - n) for n in range(sampling.prompt_top_n))  # A, B ...
    return (math.nan, *[-1.0] * more), ((), *[best] * more) if best else ()
