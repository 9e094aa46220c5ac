"""How texts and chats become tokens, and tokens texts: of the model, or of an adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.own_files import OwnFiles
from tgi_trio.router.text.thoughts.derive import Thoughts, ThoughtSettings, derive_thoughts
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.router.text.tokenizer_files import TokenizerConfig
from tgi_trio.router.text.tools.probe import CallStyle, find_call_style

# Raises GrammarError for a grammar that the shard cannot serve with a tokenizer.json (None: the
# model's).
CheckGrammar = Callable[[str, Path | None], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class TextProcessor:
    """What a request's texts are read and written with."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None  # None: there are no chats
    thoughts: Thoughts | None = None  # None: it does not think
    call_style: CallStyle = field(default_factory=CallStyle)
    ends: tuple[int, ...] = ()  # tokens that end an answer, beside the model's
    file: Path | None = None  # its tokenizer.json, for grammars; None: the model's

    def bind(self, sampling: SamplingParameters) -> SamplingParameters:
        """Return parameters with what the shard has to know of it."""
        file = self.file if sampling.grammar else None
        return replace(sampling, ends=self.ends, tokenizer="" if file is None else str(file))


@dataclass(frozen=True, slots=True)
class ModelTextProcessor:
    """The model's text processor, and what those of adapters are made with."""

    text_processor: TextProcessor
    eos_ids: frozenset[int]  # of the model
    parts: Mapping[str, Any]  # the model's tokenizer.json without its `model`
    defaults: Mapping[str, Any] | None  # of variables of templates
    reasoning: ThoughtSettings
    keeps_added: bool = False  # whether its added tokens stand for images and the like


def make_text_processor(files: OwnFiles, model: ModelTextProcessor) -> TextProcessor:
    """Return the text processor of an adapter; the model's own if it is the same.

    Raises ModelLoadError, and ConfigurationError for a template that does not compile.
    """
    base = model.text_processor
    config = _complete(files, base.tokenizer)
    own_parts = files.file is not None and (files.parts != model.parts or not files.shares)
    tokenizer = base.tokenizer
    if files.file is not None and not files.shares:
        tokenizer = Tokenizer.from_file(files.file, config)
    elif own_parts or not _is_configured_as(config, tokenizer):
        tokenizer = base.tokenizer.derive(files.parts, config)
    if model.keeps_added:
        _check_kept(tokenizer, base.tokenizer)
    same = replace(
        base,
        tokenizer=tokenizer,
        ends=_find_ends(files, tokenizer, model),
        file=files.file if own_parts else None,
    )
    sources = {} if base.chat_template is None else base.chat_template.sources
    # That of the model may have been replaced by a flag, for adapters that have the same as well.
    own = config.chat_templates not in ({}, base.tokenizer.chat_templates)
    if not own and (not sources or _has_same_tokens(tokenizer, base.tokenizer)):
        return base if tokenizer is base.tokenizer and not same.ends else same
    if own:
        sources = config.chat_templates
    template = ChatTemplate(sources, tokenizer.special_tokens, defaults=model.defaults)
    response, added = config.response_template, tokenizer.added_tokens
    thoughts = derive_thoughts(template, response, added, model.reasoning)
    calls = find_call_style(template, added)
    return replace(same, chat_template=template, thoughts=thoughts, call_style=calls)


def _complete(files: OwnFiles, base: Tokenizer) -> TokenizerConfig:
    """Return the configuration; a folder without tokenizer_config.json has the model's tokens."""
    config = files.config
    if not files.configured:
        special = {**base.special_tokens, **config.special_tokens}
        config = replace(config, special_tokens=special, response_template=base.response_template)
        if files.file is None:
            config = replace(config, added_tokens=base.added_specs)
    return config


def _is_configured_as(config: TokenizerConfig, tokenizer: Tokenizer) -> bool:
    same = config.special_tokens == tokenizer.special_tokens
    return same and config.added_tokens == tokenizer.added_specs


def _find_ends(files: OwnFiles, tokenizer: Tokenizer, model: ModelTextProcessor) -> tuple[int, ...]:
    """Return the tokens that end an answer beside the model's.

    That of its tokenizer is one if the model's tokenizer has another, whether that ends an answer
    of the model or not.
    """
    ends = set(files.ends)
    eos = tokenizer.special_tokens.get("eos_token")
    if eos is not None and eos != model.text_processor.tokenizer.special_tokens.get("eos_token"):
        found = tokenizer.token_id(eos)
        if found is None:
            raise ModelLoadError(f"the `eos_token` {eos!r} is not a token of the tokenizer")
        ends.add(found)
    return tuple(sorted(ends - model.eos_ids))


def _has_same_tokens(own: Tokenizer, base: Tokenizer) -> bool:
    """Return whether templates and what is derived from them find the same tokens."""
    same = own.special_tokens == base.special_tokens
    return same and own.added_tokens == base.added_tokens


def _check_kept(own: Tokenizer, base: Tokenizer) -> None:
    """Raise ModelLoadError for a tokenizer that lacks a token which may stand for an image."""
    for text, id in base.added_tokens.items():
        if own.added_tokens.get(text) != id:
            raise ModelLoadError(
                f"its tokenizer does not have {text!r} as token {id}, which prompts with images or "
                "sounds may need"
            )
