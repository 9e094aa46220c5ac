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
# Sentence ends, also in Bengali, Urdu, ...
_SENTENCES: Final = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_BLOOM: Final = _splits(_SENTENCES)
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
_CHINESE_JAPANESE: Final = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WORDS_AND_MARKS: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_3: Final = _splits(r"\p{N}{1,3}", _CHINESE_JAPANESE, _WORDS_AND_MARKS)
# Digits in threes from the last one; scripts without spaces between words.
_AFMOE: Final = _splits(
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    r"\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff"
    r"\uac00-\ud7af\u1100-\u11ff]+",
    _WORDS_AND_MARKS,
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
_TINY_AYA: Final = _splits(
    r"\d{1,3}(?=(?:\d{3})*\b)", _words_by_case(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")
)
_YOUTU: Final = _splits(
    r"[\uac00-\ud7a3\u3131-\u318e]+"
    r"|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    rf"|[\u3105-\u312f]+|{_CHINESE_JAPANESE}",
    _words_by_case(r"\p{N}", f"{_CONTRACTIONS}?"),
)
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
_LAGUNA: Final = _splits(r"[^\n]+|[\n]+", _words_and_digits(r"\p{N}"))
_MINICPM5: Final = _splits(r"\p{N}{1,3}", _words_and_digits(r"\p{N}+"))
_VIKING: Final = _splits(_SENTENCES, r"\p{N}")
_BAILING: Final = _splits(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
# Words with a space between them are one piece.
_EXAONE_MOE: Final = _splits(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Spaces in lengths that are powers of two.
_JAIS2: Final = _splits(
    _words_and_digits(r"\p{N}{1,3}").removesuffix(r"|\s+(?!\S)|\s+")
    + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
    + r"|\s{1}"
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
    (
        PreTokenizer(_GPT2),
        "gpt-2 phi-2 mpt olmo jais roberta-bpe trillion exaone4 mellum gigachat a.x-4.0 "
        "granite-docling",
    ),
    (
        PreTokenizer(_SINGLE_DIGITS),
        "smollm starcoder refact command-r codeshell exaone mellum2 minerva-7b",
    ),
    (
        PreTokenizer(_LLAMA3, whole_words_first=True, begins_with_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 lfm2 pixtral midm-2.0",
    ),
    (PreTokenizer(_LLAMA3), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer(_LLAMA3, whole_words_first=True), "glm4 glm5"),
    (PreTokenizer(_QWEN2, _NFC), "qwen2 deepseek-r1-qwen kormo"),
    (PreTokenizer(_QWEN35, _NFC), "qwen35"),
    (PreTokenizer(_QWEN2), "stablelm2 hunyuan megrez solar-open grok-2"),
    (PreTokenizer(_FALCON), "falcon"),
    (PreTokenizer(_BLOOM), "bloom poro-chat gpt3-finnish"),
    (PreTokenizer(_VIKING), "viking"),
    (PreTokenizer(_DEEPSEEK_CODER), "deepseek-coder"),
    (PreTokenizer(_DEEPSEEK_2), "deepseek-llm"),
    (PreTokenizer(_DEEPSEEK_3), "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
    (PreTokenizer(_GPT4O), "gpt-4o llama4 kanana2 minimax-m2"),
    (PreTokenizer(_KIMI), "kimi-k2"),
    (PreTokenizer(_SEED), "seed-coder"),
    (PreTokenizer(_TEKKEN, whole_words_first=True, begins_with_bos=True), "tekken"),
    (PreTokenizer(_AFMOE), "afmoe"),
    (PreTokenizer(_TINY_AYA), "tiny_aya cohere2moe"),
    (PreTokenizer(_YOUTU, whole_words_first=True), "youtu"),
    (PreTokenizer(_LAGUNA), "laguna"),
    (PreTokenizer(_MINICPM5, whole_words_first=True), "minicpm5"),
    (PreTokenizer(_BAILING), "bailingmoe bailingmoe2"),
    (PreTokenizer(_EXAONE_MOE), "exaone-moe"),
    (PreTokenizer(_JAIS2), "jais-2"),
)
PRE_TOKENIZERS: Final = {name: kind for kind, names in _KINDS for name in names.split()}


def find_pre_tokenizer(name: Any) -> PreTokenizer | None:
    """Return the pre-tokenizer of that name, None if it is unknown."""
    return PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
