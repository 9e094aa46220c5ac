"""Pre-tokenizers of byte-level BPE, by the names in `tokenizer.ggml.pre`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words_and_digits(digits: str) -> str:
    """Return the expression of GPT-4 and its relatives; `digits`: the expression for digits."""
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
    """Return the step that writes bytes as characters; `cuts`: after GPT-2's splits."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": cuts}


def _sequence(*steps: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _splits(*patterns: str) -> Json:
    """Return splits one after the other: each splits the pieces of the previous ones."""
    return _sequence(*map(_split, patterns), _bytes(cuts=False))


_GPT2: Final = _bytes(cuts=True)
_SINGLE_DIGITS: Final = _sequence({"type": "Digits", "individual_digits": True}, _GPT2)
_LLAMA3: Final = _sequence(_split(_words_and_digits(r"\p{N}{1,3}")), _bytes(cuts=False))
_QWEN2: Final = _sequence(_split(_words_and_digits(r"\p{N}")), _bytes(cuts=False))
# Combining marks belong to the letters before them.
_QWEN35: Final = _splits(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
# GPT-2's words, where other splits come before or after.
_GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_FALCON: Final = _splits(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]")
_BLOOM: Final = _splits(
    # sentence ends, also in Bengali, Urdu, ...
    r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
)
_HAN: Final = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER: Final = _splits(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")
_DEEPSEEK_2: Final = _splits(
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",  # letters with case
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _HAN,
    r"\p{N}+",
)
_DEEPSEEK_3: Final = _splits(
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# A word in capitals ends where a small letter begins; its ending is matched by case, too.
_CAPITALS: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words_by_case(digits: str, endings: str) -> str:
    """Return the expression of GPT-4o and its relatives; `endings`: suffixes kept with words."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}*{_SMALL}+{endings}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_CAPITALS}+{_SMALL}*{endings}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT4O: Final = _splits(_words_by_case(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"))
_KIMI: Final = _splits(
    rf"\p{{Han}}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_CAPITALS}&&[^\p{{Han}}]]*[{_SMALL}&&[^\p{{Han}}]]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_CAPITALS}&&[^\p{{Han}}]]+[{_SMALL}&&[^\p{{Han}}]]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN: Final = _splits(_words_by_case(r"\p{N}", ""))
_SEED: Final = _splits(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_NFC: Final = {"type": "NFC"}


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A way to pre-tokenise texts."""

    pre_tokenizer: Json
    normalizer: Json | None = None
    whole_words_first: bool = False  # a piece that is a token is not merged in another way
    begins_with_bos: bool = False  # default for files that do not state it


_KINDS: Final = (
    (PreTokenizer(_GPT2), "gpt-2 phi-2 mpt olmo jais roberta-bpe trillion"),
    (PreTokenizer(_SINGLE_DIGITS), "smollm starcoder refact command-r codeshell"),
    (
        PreTokenizer(_LLAMA3, whole_words_first=True, begins_with_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 lfm2 pixtral",
    ),
    (PreTokenizer(_LLAMA3), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (PreTokenizer(_QWEN2, _NFC), "qwen2 deepseek-r1-qwen"),
    (PreTokenizer(_QWEN35, _NFC), "qwen35"),
    (PreTokenizer(_QWEN2), "stablelm2"),
    (PreTokenizer(_FALCON), "falcon"),
    (PreTokenizer(_BLOOM), "bloom poro-chat gpt3-finnish"),
    (PreTokenizer(_DEEPSEEK_CODER), "deepseek-coder"),
    (PreTokenizer(_DEEPSEEK_2), "deepseek-llm"),
    (PreTokenizer(_DEEPSEEK_3), "deepseek-v3"),
    (PreTokenizer(_GPT4O), "gpt-4o llama4"),
    (PreTokenizer(_KIMI), "kimi-k2"),
    (PreTokenizer(_SEED), "seed-coder"),
    (PreTokenizer(_TEKKEN, whole_words_first=True, begins_with_bos=True), "tekken"),
)
PRE_TOKENIZERS: Final = {name: kind for kind, names in _KINDS for name in names.split()}


def find_pre_tokenizer(name: Any) -> PreTokenizer | None:
    """Return the pre-tokenizer of that name, None if it is unknown."""
    return PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
