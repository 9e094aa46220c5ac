"""How a text is cut before byte-level BPE, by the names of `tokenizer.ggml.pre`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words_and_digits(digits: str) -> str:
    """Return the expression of GPT-4's kin; `digits`: how many of them stay together."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _split(pattern: str) -> Json:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _bytes(*, cuts: bool) -> Json:
    """Return what writes bytes as characters; `cuts`: in GPT-2's words, which it knows."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": cuts}


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


_GPT2: Final = _bytes(cuts=True)
_SINGLE_DIGITS: Final = _sequence({"type": "Digits", "individual_digits": True}, _GPT2)
_LLAMA3: Final = _sequence(_split(_words_and_digits(r"\p{N}{1,3}")), _bytes(cuts=False))
_QWEN2: Final = _sequence(_split(_words_and_digits(r"\p{N}")), _bytes(cuts=False))
_NFC: Final = {"type": "NFC"}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting texts."""

    pre_tokenizer: Json
    normalizer: Json | None = None
    whole_words_first: bool = False  # a piece that is a token is not merged any other way
    begins_with_bos: bool = False  # where the file does not say


_KINDS: Final = (
    (PreTokenizer(_GPT2), "gpt-2 phi-2 mpt olmo jais roberta-bpe trillion"),
    (PreTokenizer(_SINGLE_DIGITS), "smollm starcoder refact command-r codeshell"),
    (
        PreTokenizer(_LLAMA3, whole_words_first=True, begins_with_bos=True),
        "llama3 llama-v3 llama-bpe",
    ),
    (PreTokenizer(_LLAMA3), "dbrx smaug-bpe"),
    (PreTokenizer(_QWEN2, _NFC), "qwen2 deepseek-r1-qwen"),
    (PreTokenizer(_QWEN2), "stablelm2"),
)
PRE_TOKENIZERS: Final = {name: kind for kind, names in _KINDS for name in names.split()}


def find_pre_tokenizer(name: Any) -> PreTokenizer | None:
    """Return the way of that name, None where it is not known."""
    return PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
