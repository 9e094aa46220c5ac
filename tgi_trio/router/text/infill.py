"""Infilling (fill-in-the-middle, FIM): prompts for a text between two others, as in an editor.

A model that was trained for it (Bavarian et al., 2022, https://arxiv.org/abs/2207.14255) has tokens
that mark what stands before a gap and what stands behind it, and mostly one more, behind which it
writes what belongs into the gap. How it was trained is told by the names of these tokens, and by
nothing else in a model's folder. Some have tokens for other files of the same repository as well,
which are written in front (Hui et al., 2024, https://arxiv.org/abs/2409.12186).
"""

# ruff: noqa: RUF001 - DeepSeek's own marks have a bar of full width

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from tgi_trio.ipc.messages import IntArray

# What stands for names that editors do not send: llama.cpp's, so that prompts are the same.
_REPOSITORY: Final = "myproject"
_FILE: Final = "filename"


class Reader(Protocol):
    """What reads a prompt: a `Tokenizer`, or a `PlainReader`."""

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Text of an added token -> its id."""
        ...

    def encode_ids(self, text: str, add_special_tokens: bool = True) -> IntArray:
        """Return the ids of a text, int32 [tokens]. Raises ValidationError."""
        ...


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A part of another file, or of another place of the same one, that helps to fill a gap."""

    text: str
    name: str


@dataclass(frozen=True, slots=True)
class Gap:
    """What stands around a gap."""

    before: str
    behind: str
    others: tuple[OtherFile, ...] | None = None  # the nearest last; None: nothing is written of any


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """How a gap is written; all but `ends` must be tokens of the model."""

    prefix: str  # the token in front of what stands before the gap
    suffix: str  # in front of what stands behind it
    middle: str = ""  # in front of what fills it; "": that follows the prefix at once
    suffix_first: bool = False
    # In front of the names of a repository and of a file: the first that is a token of the model.
    repository: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    # Whether what stands behind the gap is read as if it continued a word: SentencePiece puts a
    # space in front of every text that is read by itself. Such a prompt is of ids, see `encode`.
    continues: bool = False
    named_in_gap: bool = False  # the name of the gap's own file belongs to what stands before it
    ends: tuple[str, ...] = ()  # tokens that end what fills the gap, beside the model's own

    def write(self, gap: Gap, tokens: Collection[str]) -> str:
        """Return the prompt for a gap, without what every prompt begins with (BOS).

        `tokens`: the added ones of the model.
        """
        if gap.others is None:
            return self._write_gap(gap.before, gap.behind)
        repository, file = _find(self.repository, tokens), _find(self.file, tokens)
        opening = f"{repository}{_REPOSITORY}\n" if repository else ""
        opening += "".join([self.write_other(each, tokens) for each in gap.others])
        name = f"{_FILE}\n" if file else ""
        if self.named_in_gap:
            return opening + file + self._write_gap(name + gap.before, gap.behind)
        return opening + file + name + self._write_gap(gap.before, gap.behind)

    def encode(self, gap: Gap, tokenizer: Reader) -> list[int]:
        """Return the prompt of a format that `continues`, with what it begins with (BOS).

        As Meta's code reads it (`encode_infilling` in https://github.com/meta-llama/codellama): a
        character that is in no word goes in front, and its tokens are dropped.
        """
        added = tokenizer.added_tokens

        def read(text: str) -> list[int]:
            ids: list[int] = tokenizer.encode_ids(text, add_special_tokens=False).tolist()
            return ids

        others = "".join([self.write_other(each, added) for each in gap.others or ()])
        opening: list[int] = tokenizer.encode_ids(others).tolist()
        return [
            *opening,
            *(added[self.prefix], *read(gap.before), added[self.suffix]),
            *read(_WEDGE + gap.behind)[len(read(_WEDGE)) :],
            added[self.middle],
        ]

    def write_other(self, other: OtherFile, tokens: Collection[str]) -> str:
        """Return a part of another file as it is written in front of a gap."""
        if file := _find(self.file, tokens):
            return f"{file}{other.name}\n{other.text}"
        return f"\n\n--- {other.name} ---\n\n{other.text}"

    def _write_gap(self, before: str, behind: str) -> str:
        prefix, suffix = self.prefix + before, self.suffix + behind
        first, second = (suffix, prefix) if self.suffix_first else (prefix, suffix)
        return first + second + self.middle

    def rename(self, name: Callable[[str], str]) -> InfillFormat:
        """Return the format with other names for its tokens."""
        return replace(
            self,
            prefix=name(self.prefix),
            suffix=name(self.suffix),
            middle=name(self.middle),
            repository=tuple(map(name, self.repository)),
            file=tuple(map(name, self.file)),
            ends=tuple(map(name, self.ends)),
        )

    @property
    def marks(self) -> tuple[str, ...]:
        """The tokens that must be there."""
        return tuple(filter(None, (self.prefix, self.suffix, self.middle)))

    @property
    def others_begin(self) -> tuple[str, ...]:
        """The tokens behind which another file or repository begins."""
        return (*self.repository, *self.file)

    def end_ids(self, added_tokens: Mapping[str, int]) -> tuple[int, ...]:
        """Return the tokens that end what fills the gap: a model goes on with another file."""
        ends = (*self.marks, *self.others_begin, *self.ends)
        return tuple(added_tokens[end] for end in ends if end in added_tokens)


def _find(names: Sequence[str], tokens: Collection[str]) -> str:
    """Return the first name that is a token; "": none is."""
    return next((name for name in names if name in tokens), "")


_WEDGE: Final = "\u263a"

# More particular ones first.
FORMATS: Final[Mapping[str, InfillFormat]] = {
    "Qwen 2.5 Coder and later, CodeGemma, Granite 4": InfillFormat(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        repository=("<|repo_name|>",),
        file=("<|file_sep|>", "<|file_separator|>"),
        ends=("<|fim_pad|>", "<|endoftext|>"),
    ),
    "StarCoder, Granite Code, Stable Code": InfillFormat(
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        repository=("<repo_name>",),  # StarCoder 2's, as the next one
        file=("<file_sep>",),
        named_in_gap=True,
        ends=("<fim_pad>", "<|endoftext|>"),
    ),
    "SantaCoder": InfillFormat(
        *("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ends=("<fim-pad>", "<|endoftext|>")
    ),
    "DeepSeek Coder, DeepSeek V2 and later": InfillFormat(
        "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"
    ),
    "Seed-Coder": InfillFormat(
        *("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), suffix_first=True
    ),
    "GLM 4.5 and later": InfillFormat(
        *("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), ends=("<|endoftext|>",)
    ),
    "Codestral and other models of Mistral": InfillFormat(
        "[PREFIX]", "[SUFFIX]", suffix_first=True, ends=("[MIDDLE]",)
    ),
    "CodeLlama": InfillFormat(*("▁<PRE>", "▁<SUF>", "▁<MID>"), continues=True, ends=("▁<EOT>",)),
}


def find_infill(added_tokens: Mapping[str, int]) -> InfillFormat | None:
    """Return how a model with these tokens fills gaps; None: it was not trained for that."""
    for each in FORMATS.values():
        if all(mark in added_tokens for mark in each.marks):
            return each
    return None
