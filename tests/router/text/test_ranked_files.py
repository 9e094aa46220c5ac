"""Files of tiktoken's with code of their own, which is not run: ids are those of tiktoken."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from tgi_trio.errors import ModelLoadError
from tgi_trio.router.text.ranked_files import KINDS
from tgi_trio.router.text.tokenizer_files import tokenizer_json

# As their own code has them.
KIMI: Final = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"""
        r"""[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
GLM: Final = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+"
    "[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
PATTERNS: Final = {"TikTokenTokenizer": KIMI, "ChatGLM4Tokenizer": GLM}
CODE: Final = {
    "TikTokenTokenizer": ["tokenization_kimi.TikTokenTokenizer", None],
    "ChatGLM4Tokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None],
}
TEXTS: Final = (
    "Hello, World! It's 12345 o'clock; WE'LL see.",
    "北京是中华人民共和国的首都。abc 中文 Mixed中文Text 東京タワー",
    "  two  spaces\n\n\ttabs \r\n and   trailing   ",
    "naïve Ærøskøbing İstanbul ǅungla e\u0301 한국어 العربية हिन्दी",
    'fn main() { println!("{}", 1_000); }\n# ---\n👩‍👩‍👧 ½ ² Ⅷ',
    "",
)
# Of which pieces differ by pattern.
LETTERS: Final = (
    *"abzABZ 019\n\r\t'_-.!/中文éÉ",
    *("'s", "'LL", "İ", "ǅ", "ª", "\u0301", "が", "한", "½", "\u3000", "\U0001f469", "\u200d", "ʰ"),
)


@cache
def ranks() -> dict[bytes, int]:
    """Return ranks of every byte, and of any two of `LETTERS`, so that ids tell pieces apart."""
    own = [letter.encode() for letter in LETTERS]
    parts = [letter[:end] for letter in own for end in range(2, len(letter) + 1)]
    pairs = [first + second for first in own for second in own]
    tokens = dict.fromkeys((*(bytes([byte]) for byte in range(256)), *parts, *pairs))
    return {token: rank for rank, token in enumerate(tokens)}


def write(folder: Path, kind: str, **config: Any) -> Path:
    """Write a folder with a vocabulary and the configuration of a tokenizer with code."""
    lines = [f"{b64encode(token).decode()} {rank}" for token, rank in ranks().items()]
    (folder / KINDS[kind].file).write_text("\n".join(lines) + "\n")
    said = {"auto_map": {"AutoTokenizer": CODE[kind]}, "tokenizer_class": kind} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_tiktoken(tmp_path: Path, kind: str) -> None:
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    from tokenizers import Tokenizer

    encoding = tiktoken.Encoding(
        name="own", pat_str=PATTERNS[kind], mergeable_ranks=ranks(), special_tokens={}
    )
    file = tokenizer_json(write(tmp_path, kind), tmp_path / "cache")
    assert tokenizer_json(tmp_path, tmp_path / "cache") == file
    tokenizer = Tokenizer.from_file(str(file))
    draw = random.Random(kind)
    drawn = ["".join(draw.choices(LETTERS, k=draw.randint(1, 24))) for _ in range(1500)]
    for text in (*TEXTS, *drawn):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == encoding.encode_ordinary(text), text
        assert tokenizer.decode(ids) == text


def test_tokens_of_kimi_are_named_by_the_configuration_or_by_their_ids(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    count = len(ranks())
    named = {
        count: {"content": "[BOS]", "special": True},
        count + 3: {"content": "<|tool_call_begin|>", "special": False},
    }
    write(tmp_path, "TikTokenTokenizer", added_tokens_decoder=named)
    tokenizer = Tokenizer.from_file(str(tokenizer_json(tmp_path, tmp_path / "cache")))
    text = f"[BOS]<|tool_call_begin|><|reserved_token_{count + 5}|>"
    ids = [count, count + 3, count + 5]
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids) == "<|tool_call_begin|>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == count + 256


def test_texts_of_glm_begin_as_its_own_code_has_them(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    count = len(ranks())
    named = {count + 14: {"content": "<|code_prefix|>", "special": True}}  # CodeGeeX 4's
    write(tmp_path, "ChatGLM4Tokenizer", added_tokens_decoder=named)
    tokenizer = Tokenizer.from_file(str(tokenizer_json(tmp_path, tmp_path / "cache")))
    assert tokenizer.encode("<|user|>").ids == [count + 2, count + 4, count + 7]
    assert tokenizer.encode("<|code_prefix|>", add_special_tokens=False).ids == [count + 14]


def test_code_of_another_class_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path, "TikTokenTokenizer", auto_map={"AutoTokenizer": ["tokenization_x.X", None]})
    with pytest.raises(ModelLoadError, match=r"is Python code \(tokenization_x\.X\)"):
        tokenizer_json(tmp_path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("content", "config", "message"),
    [
        (b"\n", {}, "are not ranked from 0 on, or lack a byte"),
        (b"IQ== 0\n", {}, "are not ranked from 0 on, or lack a byte"),
        (b"IQ== zero\n", {}, "cannot be read as a tokenizer of tiktoken's"),
        (b"? 0\n", {}, "cannot be read as a tokenizer of tiktoken's"),
        (b"IQ==\n", {}, "cannot be read as a tokenizer of tiktoken's"),
        (b"\x0a\x0d\x01<unk>", {}, "cannot be read as a tokenizer of tiktoken's"),  # sentencepiece
        (None, {"added_tokens_decoder": {"x": {}}}, "cannot be read as a tokenizer of tiktoken's"),
        (None, {"added_tokens_decoder": {"4000": {}}}, "cannot be read as a tokenizer"),
        (None, {"added_tokens_decoder": {"4000": {"content": 3}}}, "which is no text"),
        (None, {"added_tokens_decoder": []}, "cannot be read as a tokenizer"),
        (None, {"added_tokens_decoder": {"5": {"content": "<x>"}}}, "names tokens of tiktoken"),
        (
            None,
            {"added_tokens_decoder": {str(n): {"content": "<x>"} for n in (4000, 4001)}},
            "one text twice",
        ),
    ],
)
def test_files_of_another_form_are_refused(
    tmp_path: Path, content: bytes | None, config: dict[str, Any], message: str
) -> None:
    write(tmp_path, "TikTokenTokenizer", **config)
    if content is not None:
        (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        tokenizer_json(tmp_path, tmp_path / "cache")
