"""The tokenizer of the served model, and the threads that run it.

A `Tokenizer` is made once at the start and only read afterwards, so any number of threads may use
it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

import numpy as np
import tokenizers
import trio
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError, ValidationError
from tgi_trio.process.library_panics import raising_panics
from tgi_trio.process.thread_limit import CURE
from tgi_trio.process.threads import run_in_thread
from tgi_trio.router.text.clean_up import CleaningDetokenizer, clean_up
from tgi_trio.router.text.detokenizer import (
    CONTEXT_TOKENS,
    Detokenizer,
    PieceDetokenizer,
    WindowDetokenizer,
)
from tgi_trio.router.text.pieces import pieces_for
from tgi_trio.router.text.prompt_tokens import MOST_REMEMBERED, PromptTokens
from tgi_trio.router.text.token_ids import PIECE, copy_ids
from tgi_trio.router.text.tokenizer_files import (
    TokenizerConfig,
    read_tokenizer_config,
    tokenizer_json,
)

IntArray = NDArray[np.int32]
Given = TypeVar("Given", bound=Sized)
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

# Up to this length, tokenising is about as fast as the way to a thread and back (40 us).
INLINE_CHARACTERS = 160
# From this length on, it pays to look up what has been tokenised before.
LONG_PROMPT = 4096  # characters
_DERIVED_REMEMBERED = 1 << 18  # tokens of pieces of prompts that a derived tokenizer keeps: 1 MiB
_NO_MODEL = {"type": "BPE", "vocab": {}, "merges": []}


@dataclass(frozen=True, slots=True)
class Encoding:
    """A tokenised text."""

    ids: IntArray  # int32 [tokens]
    offsets: list[tuple[int, int]]  # [tokens] start and end, characters; (0, 0): not in the text
    text: str

    def byte_offsets(self) -> list[tuple[int, int]]:
        """Return `offsets` in bytes of the text's UTF-8, as `/tokenize` reports them."""
        if self.text.isascii():
            return self.offsets
        widths = np.fromiter(map(_utf8_width, self.text), dtype=np.int64, count=len(self.text))
        position = np.concatenate(([0], np.cumsum(widths))).tolist()
        return [(position[start], position[end]) for start, end in self.offsets]


def _utf8_width(character: str) -> int:
    code = ord(character)
    return 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000)


class Tokenizer:
    """A `tokenizers` tokenizer, with the special tokens that the model's folder specifies."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: TokenizerConfig,
        remembered: int = MOST_REMEMBERED,
    ) -> None:
        """Adds to `backend` the tokens that only the configuration has, as transformers does.

        `remembered`: most tokens of pieces of prompts that are kept.
        """
        backend.no_truncation()  # limits are checked elsewhere, and padding is never wanted
        backend.no_padding()
        _add_missing(backend, config)
        self._backend = backend
        self.chat_templates = config.chat_templates
        self.response_template = config.response_template
        self.special_tokens = config.special_tokens  # "eos_token" and so on -> text
        self.added_specs = config.added_tokens  # as the configuration has them
        self.special_ids = _special_ids(backend, config)
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {token.content: id for id, token in added.items()}  # text -> id
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._prompt_tokens = PromptTokens(backend, remembered)
        decoder = backend.decoder
        state = decoder.__getstate__() if decoder is not None else None
        beside = {
            id: token.content
            for id, token in added.items()
            if backend.model.token_to_id(token.content) is None
        }
        self._pieces = pieces_for(state, backend.id_to_token, beside)
        pairs = isinstance(backend.model, tokenizers.models.BPE)
        self._cleans_up = config.cleans_up and (config.cleans_up_pairs or not pairs)

    @classmethod
    def from_folder(
        cls,
        path: Path,
        *,
        config_path: Path | None = None,
        cache: Path | None = None,
        trust_remote_code: bool = False,
    ) -> Tokenizer:
        """Load the tokenizer of a model folder. Takes up to seconds, so call it before serving.

        `config_path` replaces tokenizer_config.json; `cache`: where a tokenizer without
        tokenizer.json is converted to. Raises ModelLoadError.
        """
        file = tokenizer_json(path, cache, trust_remote_code)
        return cls.from_file(file, read_tokenizer_config(path, config_path))

    @classmethod
    def from_file(cls, file: Path, config: TokenizerConfig) -> Tokenizer:
        """Load a tokenizer.json. The whole process waits for it. Raises ModelLoadError."""
        try:
            backend = raising_panics(tokenizers.Tokenizer.from_file)(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"{file} cannot be loaded as a tokenizer: {error}") from error
        _start_threads(backend, file)
        return cls(backend, config)

    def derive(self, parts: Mapping[str, Any], config: TokenizerConfig) -> Tokenizer:
        """Return a tokenizer with this one's vocabulary, which both then share.

        `parts`: all else, as tokenizer.json has it beside `model`. Takes milliseconds and little
        memory, where a file takes up to a second. Raises ModelLoadError.
        """
        shell = {**parts, "added_tokens": [], "model": _NO_MODEL}
        try:
            backend = raising_panics(tokenizers.Tokenizer.from_str)(json.dumps(shell))
            backend.model = self._backend.model
            given = sorted(parts.get("added_tokens") or (), key=lambda each: int(each["id"]))
            fields = [{k: v for k, v in each.items() if k != "id"} for each in given]
            backend.add_tokens([tokenizers.AddedToken(**each) for each in fields])
        except Exception as error:  # the library raises plain Exception
            raise ModelLoadError(f"the tokenizer cannot be loaded: {error!r}") from error
        for each in given:
            if (found := backend.token_to_id(each["content"])) != each["id"]:
                raise ModelLoadError(
                    f"the added token {each['content']!r} of the tokenizer has the id "
                    f"{each['id']}, and would get {found}"
                )
        return Tokenizer(backend, config, _DERIVED_REMEMBERED)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, which nobody changes."""
        return self._backend

    def encode_ids(self, text: str, add_special_tokens: bool = True) -> IntArray:
        """Return the token ids of `text`, int32 [tokens]. Raises ValidationError."""
        return np.array(self._encode_text(text, add_special_tokens).ids, dtype=np.int32)

    def encode_prompt(
        self, text: str, add_special_tokens: bool, truncate: int | None, most: int
    ) -> tuple[IntArray, int]:
        """Return the last `truncate` ids of `text` (None: all), int32, and their number.

        More than `most` are only counted: a list of ids that are refused anyway would block all
        other threads for milliseconds. Raises ValidationError.
        """
        if len(text) > LONG_PROMPT and not add_special_tokens:
            refused = math.inf if truncate is not None and truncate <= most else most
            ids, count = self._encode_pieces(text, refused)
            length = min(count, truncate or count)
            return (np.empty(0, dtype=np.int32) if length > most else ids[-length:]), length
        found = self._encode_text(text, add_special_tokens)
        length = min(len(found), truncate or len(found))
        if length > most:
            return np.empty(0, dtype=np.int32), length
        return np.array(found.ids[-length:] if length else [], dtype=np.int32), length

    @raising_panics
    def _encode_pieces(self, text: str, most: float) -> tuple[IntArray, int]:
        try:
            return self._prompt_tokens.encode(text, most)
        except Exception as error:  # the library raises plain Exception
            raise ValidationError(f"tokenizer error {error}") from error

    @raising_panics
    def _encode_text(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            if len(text) <= INLINE_CHARACTERS:
                return self._backend.encode(text, add_special_tokens=add_special_tokens)
            # Of the library's calls only batch calls release the GIL, and only this one skips
            # offsets.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except Exception as error:  # the library raises plain Exception, for lone surrogates too
            raise ValidationError(f"tokenizer error {error}") from error

    @raising_panics
    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Return ids and offsets of `text`. Raises ValidationError. `encode_ids` is faster."""
        try:
            found = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except Exception as error:
            raise ValidationError(f"tokenizer error {error}") from error
        return Encoding(np.array(found.ids, dtype=np.int32), found.offsets, text)

    def decode(self, ids: Sequence[int] | IntArray, skip_special: bool = True) -> str:
        """Return the text of `ids`; ids without a token have no text."""
        listed = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if skip_special:
            listed = [token_id for token_id in listed if token_id not in self.special_ids]
        text = self._decode(listed)
        return clean_up(text) if self._cleans_up else text

    @raising_panics
    def _decode(self, ids: Sequence[int]) -> str:
        if len(ids) <= INLINE_CHARACTERS:
            return self._backend.decode(ids, skip_special_tokens=False)
        # Only batch calls release the GIL.
        return self._backend.decode_batch([ids], skip_special_tokens=False)[0]

    @raising_panics
    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself; U+FFFD for a part of a character.

        Unlike TGI's it keeps a leading space, so it equals the token's text in a stream.
        """
        if self._pieces is None:
            return self._backend.decode([token_id], skip_special_tokens=False)
        piece = self._pieces[token_id]
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the UTF-8 bytes of one token, which may be a part of a character.

        None if they are unknown: for a part of a character, with decoders that only produce whole
        characters.
        """
        if self._pieces is None:
            text = self.token_text(token_id)
            return None if "\ufffd" in text else text.encode()
        piece = self._pieces[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def written(self, ids: Sequence[int] | IntArray) -> list[str]:
        """Return each token as the vocabulary writes it, such as `Ġthe`; "" for ids without one."""
        return [self._backend.id_to_token(int(token_id)) or "" for token_id in ids]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary writes it."""
        return self._backend.token_to_id(token)

    def detokenizer(self, prompt_ids: Sequence[int] | IntArray) -> Detokenizer:
        """Return a detokeniser for the tokens generated after `prompt_ids`."""
        context = [int(token_id) for token_id in prompt_ids[-CONTEXT_TOKENS:]]
        found: Detokenizer
        if self._pieces is not None:
            found = PieceDetokenizer(self._pieces, context)
        else:
            found = WindowDetokenizer(self._decode, context)
        return CleaningDetokenizer(found) if self._cleans_up else found


class TokenizerPool:
    """Tokenises in threads of its own, so that a long text does not block the event loop."""

    def __init__(self, tokenizer: Tokenizer, workers: int) -> None:
        """`workers`: texts that may be tokenised at the same time (`--validation-workers`)."""
        self.tokenizer = tokenizer
        self._limiter = trio.CapacityLimiter(workers)

    async def encode_prompt(
        self,
        text: str,
        add_special_tokens: bool,
        truncate: int | None,
        most: int,
        tokenizer: Tokenizer | None = None,
    ) -> tuple[IntArray, int]:
        """Return `Tokenizer.encode_prompt` of the model's, or of another `tokenizer`.

        A checkpoint. Raises ValidationError.
        """
        encode = (tokenizer or self.tokenizer).encode_prompt
        return await self._run(text, encode, add_special_tokens, truncate, most)

    async def take_ids(self, ids: Sequence[int] | IntArray) -> IntArray:
        """Return a copy of ids, int32: what they were cut from is not kept with a request.

        Many are copied in a thread. Raises OverflowError, TypeError and ValueError for what are
        none.
        """
        return copy_ids(ids) if len(ids) <= PIECE else await self._run(ids, copy_ids)

    async def _run(
        self,
        given: Given,
        function: Callable[[Given, Unpack[Arguments]], Result],
        *arguments: *Arguments,
    ) -> Result:
        if len(given) <= INLINE_CHARACTERS:
            await trio.lowlevel.checkpoint()
            return function(given, *arguments)
        # Nothing waits for the thread of a client that has left: it keeps its place among `workers`
        # until it is done, and its result is dropped.
        return await run_in_thread(partial(function, given, *arguments), self._limiter)


def _start_threads(backend: tokenizers.Tokenizer, file: Path) -> None:
    """Have the library start its threads, which it never can if it cannot when it first tries.

    Raises ModelLoadError, also for a file that cannot even make tokens of an empty text.
    """
    try:
        raising_panics(backend.encode_batch_fast)([""])
    except Exception as error:  # the library raises plain Exception
        if "thread pool" in str(error):
            raise ModelLoadError(f"the tokenizer cannot start its threads: {CURE}") from error
        raise ModelLoadError(f"{file} cannot be used as a tokenizer: {error}") from error


def _add_missing(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    # A named token outside the vocabulary would get an id that the model does not have.
    named = dict.fromkeys(
        text
        for text in config.special_tokens.values()
        if text not in known and backend.token_to_id(text) is not None
    )
    specs = [spec for spec in config.added_tokens if spec.content not in known]
    added = [
        tokenizers.AddedToken(
            spec.content,
            special=spec.special,
            lstrip=spec.lstrip,
            rstrip=spec.rstrip,
            single_word=spec.single_word,
            normalized=spec.normalized,
        )
        for spec in specs
    ]
    present = {spec.content for spec in specs}
    added += [tokenizers.AddedToken(text, special=True) for text in named if text not in present]
    if added:
        backend.add_tokens(added)


def _special_ids(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> frozenset[int]:
    """Return the ids that tokenizer.json or the configuration marks as special."""
    added = backend.get_added_tokens_decoder()
    named = set(config.special_tokens.values())
    named |= {spec.content for spec in config.added_tokens if spec.special}
    return frozenset(
        token_id for token_id, token in added.items() if token.special or token.content in named
    )
