"""Ways of cutting a text, against expressions applied one after the other by Python's `regex`."""

from __future__ import annotations

import json

import pytest
import regex  # type: ignore[import-untyped]
import tokenizers

from tests.router.text.kinds import CORPUS
from tgi_trio.model.gguf.pre_tokenizers import PRE_TOKENIZERS

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LETTERS = r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"
HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
MARKS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
THIRD = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CAPITALS, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SHORT = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
LAST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
# As llama.cpp's table of them has it.
EXPRESSIONS = {
    "gpt-2": [WORDS],
    "smollm": [r"\p{N}", WORDS],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", WORDS, "[0-9][0-9][0-9]"],
    "bloom": [" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}"],
    "deepseek-llm": [r"[\r\n]", LETTERS, rf"\s?{MARKS}", r"\s+$", HAN, r"\p{N}+"],
    "gpt-4o": [
        f"{LEAD}{CAPITALS}*{SMALL}+{ENDINGS}|{LEAD}{CAPITALS}+{SMALL}*{ENDINGS}"
        rf"|\p{{N}}{{1,3}}|{REST}"
    ],
    "qwen35": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
        r"|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "kimi-k2": [
        rf"\p{{Han}}+|{LEAD}(?:(?!\p{{Han}}){CAPITALS})*(?:(?!\p{{Han}}){SMALL})+{ENDINGS}"
        rf"|{LEAD}(?:(?!\p{{Han}}){CAPITALS})+(?:(?!\p{{Han}}){SMALL})*{ENDINGS}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "seed-coder": [
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
        r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "tekken": [rf"{LEAD}{CAPITALS}*{SMALL}+|{LEAD}{CAPITALS}+{SMALL}*|\p{{N}}|{REST}"],
    "deepseek-v3": [r"\p{N}{1,3}", KANA, THIRD],
    "afmoe": [r"\p{N}{1,3}(?=(\p{N}{3})*+(?!\p{N}))", ASIAN, THIRD],
    "cohere2moe": [
        r"\d{1,3}(?=(?:\d{3})*\b)",
        f"{LEAD}{CAPITALS}*{SMALL}+{ENDINGS}|{LEAD}{CAPITALS}+{SMALL}*{ENDINGS}"
        rf"|\p{{N}}{{1,3}}|{REST}",
    ],
    "youtu": [
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
        f"\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|{KANA}",
        f"{LEAD}{CAPITALS}*{SMALL}+{ENDINGS}|{LEAD}{CAPITALS}+{SMALL}*{ENDINGS}|\\p{{N}}|{REST}",
    ],
    "laguna": [r"[^\n]+|[\n]+", rf"{SHORT}|{LEAD}\p{{L}}+|\p{{N}}|{LAST}"],
    "minicpm5": [r"\p{N}{1,3}", rf"{SHORT}|{LEAD}\p{{L}}+|\p{{N}}+|{LAST}"],
    "viking": [" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}"],
    "bailingmoe2": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "exaone-moe": [
        rf"{SHORT}|{LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "jais-2": [
        rf"{SHORT}|{LEAD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
        r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)"
        r"|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
    ],
}
TEXTS = [
    *CORPUS,
    "It's 12345 apples,they cost $3.50 each (or 1,200 in all)!",
    "def f(x):\n    return x**2  # 100%\n\n\n\tpass",
    "\u4f60\u597d\uff0c\u4e16\u754c 2024\u5e74\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155",
    "\u0645\u0631\u062d\u0628\u0627\u060c \u0643\u064a\u0641\u061f",
    "na\u00efve  caf\u00e9 \u00e9t\u00e9  ",
    "trailing   ",
    "1234567 12 1234abc, 12\u0e01\u0e41\u0e01\u0e48\u0e07 \u3105\u3106\u201c\u3042\u201d   x     y",
    "HTTPServer's iPhone15Pro McDONALD'S don't/won't//\n\u01c5abc E\u0301t\u0327 \u02b0x",
    "we'Re <tag attr=`x`> a_b ^~| \U0001f642\U0001f642",
]


def cut(text: str, expressions: list[str]) -> list[str]:
    """Return pieces: every expression cuts out what fits it, of every piece so far."""
    pieces = [text]
    for expression in expressions:
        cut: list[str] = []
        for piece in pieces:
            end = 0
            for found in regex.finditer(expression, piece):
                cut += [piece[end : found.start()], found.group()]
                end = found.end()
            cut.append(piece[end:])
        pieces = [piece for piece in cut if piece]
    return pieces


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_texts_are_cut_as_the_expressions_say(name: str) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    parsed = json.loads(made.to_str()) | {"pre_tokenizer": PRE_TOKENIZERS[name].pre_tokenizer}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    for text in TEXTS:
        pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert [text[begin:end] for _, (begin, end) in pieces] == cut(text, EXPRESSIONS[name])
