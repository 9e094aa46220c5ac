"""Reading texts in which the names of special tokens are mere text, as in a user's files.

A tokenizer takes the text `<|fim_middle|>` for the token wherever it stands. So a second one, of
the same vocabulary, knows these tokens by secret names: prompts are written with those, and a name
in a file is read as the characters that it has.
"""

# ruff: noqa: RUF001 - DeepSeek's own tokens have a bar of full width

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import tokenizers

from tgi_trio.errors import ValidationError
from tgi_trio.ipc.messages import IntArray
from tgi_trio.process.library_panics import raising_panics
from tgi_trio.router.text.tokenizer import Tokenizer

# Tokens that a model's files do not call special, though they are: Qwen's for infilling.
_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>", re.DOTALL)


def special_names(tokenizer: Tokenizer) -> frozenset[str]:
    """Return the texts of tokens that no user means to write: as llama.cpp decides it."""
    return frozenset(
        text
        for text, id in tokenizer.added_tokens.items()
        if id in tokenizer.special_ids or _LOOKS_SPECIAL.fullmatch(text)
    )


def has_any(texts: Iterable[str], names: Collection[str]) -> bool:
    """Return whether any of `names` stands in any of the texts."""
    openings = {name[:2] for name in names}
    for text in texts:
        there = {opening for opening in openings if opening in text}  # mostly none
        if there and any(name[:2] in there and name in text for name in names):
            return True
    return False


class PlainReader:
    """A tokenizer that knows some tokens by secret names."""

    def __init__(self, tokenizer: Tokenizer, hidden: Collection[str]) -> None:
        """`hidden`: texts of added tokens. Takes milliseconds: the vocabulary is shared."""
        self.secrets: Mapping[str, str] = {name: secrets.token_hex(16) for name in hidden}
        self._tokenizer = tokenizer
        self._backend, self._real = _rename(tokenizer, self.secrets)
        names = {name: self.secrets.get(name, name) for name in tokenizer.added_tokens}
        # By the names by which they are known here: the ids that the model knows.
        self.added_tokens = {names[text]: id for text, id in tokenizer.added_tokens.items()}
        longest_first = sorted(hidden, key=len, reverse=True)
        self._spoken = re.compile("|".join(map(re.escape, longest_first)))

    def name(self, token: str) -> str:
        """Return the name by which a token is known here."""
        return self.secrets.get(token, token)

    def speak(self, text: str) -> str:
        """Return a text whose names of hidden tokens mean them."""
        return self._spoken.sub(lambda found: self.secrets[found[0]], text)

    @raising_panics
    def encode_ids(self, text: str, add_special_tokens: bool = True) -> IntArray:
        """Return the model's token ids of `text`, int32 [tokens]. Raises ValidationError."""
        try:
            found = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except Exception as error:  # the library raises plain Exception
            raise ValidationError(f"tokenizer error {error}") from error
        ids = [self._real.get(id, id) for id in found]
        before, behind = self._around() if add_special_tokens else ([], [])
        return np.array([*before, *ids, *behind], dtype=np.int32)

    def _around(self) -> tuple[list[int], list[int]]:
        """Return what the tokenizer puts in front of a prompt and behind it."""
        bare = self._tokenizer.encode_ids("a", add_special_tokens=False).tolist()
        whole: list[int] = self._tokenizer.encode_ids("a").tolist()
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        raise ValidationError("the tokenizer changes a text between the tokens that it adds")


def _rename(
    tokenizer: Tokenizer, names: Mapping[str, str]
) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """Return a tokenizer with other names for tokens, and the real ids of its added tokens."""
    backend = tokenizer.backend
    renamed = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        renamed.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        renamed.pre_tokenizer = backend.pre_tokenizer
    added = sorted(backend.get_added_tokens_decoder().items())
    real: dict[int, int] = {}
    for id, token in added:
        name = names.get(token.content, token.content)
        # Special, so that a name is found before the text is normalised, as it was.
        renamed.add_tokens(
            [
                tokenizers.AddedToken(
                    name,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                    normalized=token.normalized and name == token.content,
                    special=token.special,
                )
            ]
        )
        own = renamed.token_to_id(name)
        if own is not None:
            real[own] = id
    return renamed, real
