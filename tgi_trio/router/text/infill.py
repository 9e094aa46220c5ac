"""Infilling (fill-in-the-middle, FIM): prompts for a text between two others, as in an editor.

A model that was trained for it (Bavarian et al., 2022, https://arxiv.org/abs/2207.14255) has tokens
that mark what stands before a gap and what stands behind it, and mostly one more, behind which it
writes what belongs into the gap. How it was trained is told by the names of these tokens, and by
nothing else in a model's folder.
"""

# ruff: noqa: RUF001 - DeepSeek's own marks have a bar of full width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """How a gap is written; all but `ends` must be tokens of the model."""

    prefix: str  # the token in front of what stands before the gap
    suffix: str  # in front of what stands behind it
    middle: str = ""  # in front of what fills it; "": that follows the prefix at once
    suffix_first: bool = False
    ends: tuple[str, ...] = ()  # tokens that end what fills the gap, beside the model's own

    def write(self, before: str, behind: str) -> str:
        """Return the prompt for a gap, without what every prompt begins with (BOS)."""
        prefix, suffix = self.prefix + before, self.suffix + behind
        first, second = (suffix, prefix) if self.suffix_first else (prefix, suffix)
        return first + second + self.middle

    @property
    def marks(self) -> tuple[str, ...]:
        """The tokens that must be there."""
        return tuple(filter(None, (self.prefix, self.suffix, self.middle)))

    def end_ids(self, added_tokens: Mapping[str, int]) -> tuple[int, ...]:
        """Return the tokens that end what fills the gap: a model goes on with another file."""
        return tuple(added_tokens[end] for end in (*self.marks, *self.ends) if end in added_tokens)


# More particular ones first.
FORMATS: Final[Mapping[str, InfillFormat]] = {
    "Qwen 2.5 Coder and later, CodeGemma, Granite 4": InfillFormat(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ends=(
            *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
            "<|endoftext|>",
        ),
    ),
    "StarCoder, Granite Code, Stable Code": InfillFormat(
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ends=("<fim_pad>", "<file_sep>", "<repo_name>", "<|endoftext|>"),
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
}


def find_infill(added_tokens: Mapping[str, int]) -> InfillFormat | None:
    """Return how a model with these tokens fills gaps; None: it was not trained for that."""
    for each in FORMATS.values():
        if all(mark in added_tokens for mark in each.marks):
            return each
    return None
