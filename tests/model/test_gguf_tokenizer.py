"""Tokenizers of GGUF files: byte pairs, and pieces that are merged by scores or by merges."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from tests.model.tiny_gguf import read, tiny
from tests.router.text.kinds import CORPUS
from tgi_trio.model.gguf.folder import gguf_folder


def test_texts_that_are_there_twice_or_unused(tmp_path: Path) -> None:
    """The first of them counts, an unused one (5) never; merges that make no token are left out."""
    changes = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab", "ab", "ba"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 5],
        "tokenizer.ggml.merges": ["a b", "b a", "a c"],
    }
    folder = gguf_folder(tiny(tmp_path, changes), tmp_path / "cache")
    said = read(folder, "tokenizer.json")["model"]
    assert said["vocab"] == {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4}
    assert said["merges"] == ["a b"]


def sentence_pieces() -> tokenizers.Tokenizer:
    """Return a vocabulary of Llama 2's kind, trained on a few texts."""
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")
    ])  # fmt: skip
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("\u2581", "merged_with_next")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=pieces, show_progress=False
    )
    made.train_from_iterator(CORPUS * 4, trainer)
    return made


def test_sentence_pieces_are_merged_by_their_scores(tmp_path: Path) -> None:
    theirs = sentence_pieces()
    vocabulary = theirs.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    changes = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        # SentencePiece numbers what it merges, from 0 downwards.
        "tokenizer.ggml.scores": [-float(token_id) for token_id in range(len(tokens))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    folder = gguf_folder(tiny(tmp_path, changes), tmp_path / "cache")
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (*CORPUS, "a  b", " lead", "\U0001f642 \u65e5\u672c"):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected
        assert ours.encode(text).ids == [1, *expected]
        assert ours.decode(expected) == text


def test_sentence_pieces_are_merged_by_their_merges(tmp_path: Path) -> None:
    """As Gemma 4's files have them, without scores and a space before every text."""
    theirs = sentence_pieces()
    theirs.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    said = json.loads(theirs.to_str())["model"]
    vocabulary = said["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    changes = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in said["merges"]],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    folder = gguf_folder(tiny(tmp_path, changes), tmp_path / "cache")
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (*CORPUS, "a  b", " lead", "two\n\nlines", "\U0001f642 \u65e5\u672c"):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected
        assert ours.encode(text).ids == [1, *expected]
        assert ours.decode(expected) == text
