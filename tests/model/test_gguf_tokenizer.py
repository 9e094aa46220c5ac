"""Tokenizers of GGUF files: byte pairs, and pieces that are merged by scores or by merges."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from tests.model.tiny_gguf import Changes, read, tiny
from tests.router.text.kinds import CORPUS
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.model.gguf.tokenizer import make_tokenizer, read_vocabulary


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


@pytest.mark.parametrize("stated", [None, 10**6])  # llama.cpp passes over ids that are none, too
def test_sentence_pieces_that_state_no_begin_and_end_have_llama_cpps(
    tmp_path: Path, stated: int | None
) -> None:
    changes = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "ab"],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0],
        "tokenizer.ggml.bos_token_id": stated,
        "tokenizer.ggml.eos_token_id": stated,
    }
    folder = gguf_folder(tiny(tmp_path, changes), tmp_path / "cache")
    config = read(folder, "config.json")
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert read(folder, "generation_config.json")["eos_token_id"] == [2]
    said = read(folder, "tokenizer_config.json")
    assert (said["bos_token"], said["eos_token"]) == ("<s>", "</s>")
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ours.encode("a").ids[0] == 1, "a text begins with it, unless the file says otherwise"


def pieces_of(model: bytes) -> Changes:
    """Return a SentencePiece model's vocabulary as llama.cpp's converter writes it."""
    said = sentencepiece.SentencePieceProcessor(model_proto=model)
    kinds = (said.is_unknown, said.is_control, said.is_byte)
    ids = range(said.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": [said.id_to_piece(each) for each in ids],
        "tokenizer.ggml.token_type": [
            next((kind for kind, is_it in zip((2, 3, 6), kinds, strict=True) if is_it(each)), 1)
            for each in ids
        ],
        "tokenizer.ggml.scores": [said.get_score(each) for each in ids],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="module")
def model() -> bytes:
    """Return a SentencePiece model of byte pairs, as Llama 2's is."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=made,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return made.getvalue()


@pytest.mark.parametrize("stated", [True, False])
def test_pieces_are_merged_as_sentencepiece_merges_them(
    tmp_path: Path, model: bytes, stated: bool
) -> None:
    """Converted from a tokenizer.json, all have one score: they are in the order of merges then."""
    said = sentencepiece.SentencePieceProcessor(model_proto=model)
    changes = pieces_of(model)
    if not stated:
        changes["tokenizer.ggml.scores"] = [-1000.0] * said.vocab_size()
    folder = gguf_folder(tiny(tmp_path, changes), tmp_path / "cache")
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    dice = random.Random(0)
    mixed = ["".join(dice.choices("aeinrst \n\u65e5", k=30)) for _ in range(50)]
    for text in (*CORPUS, "a  b", " lead", *mixed):
        assert ours.encode(text, add_special_tokens=False).ids == said.encode(text)


def test_pieces_that_are_unused_are_in_no_merge(tmp_path: Path) -> None:
    """`ab` (5) would be a step to `abc`, and is none: a tokenizer with such a merge is refused."""
    changes = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": ["<s>", "</s>", "\u2581", "a", "b", "c", "ab", "abc", "bc"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 5, 1, 1],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -7.0, -8.0, -9.0, -1.0, -2.0, -3.0],
    }
    folder = gguf_folder(tiny(tmp_path, changes), tmp_path / "cache")
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ours.encode("abc", add_special_tokens=False).ids == [2, 7]
    assert ours.encode("ab", add_special_tokens=False).ids == [2, 3, 4]


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("phi3", [3, 5, 4, 2, 5]), ("llama", [3, 2, 6, 5, 4, 2, 5])],
)
def test_tokens_of_phi_3_take_the_white_space_behind_them(
    tmp_path: Path, architecture: str, expected: list[int]
) -> None:
    """As its tokenizer.json has it, of all but a few; no GGUF file states it."""
    changes = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": [
            *("<s>", "</s>", "\u2581", "<|user|>", "<|endoftext|>", "\u2581a", "<0x0A>", "a"),
        ],
        "tokenizer.ggml.token_type": [3, 3, 1, 3, 3, 1, 6, 1],
        "tokenizer.ggml.scores": [0.0] * 8,
    }
    vocabulary = read_vocabulary(changes | {"general.architecture": architecture}, tmp_path)
    ours = tokenizers.Tokenizer.from_str(json.dumps(make_tokenizer(vocabulary, tmp_path)))
    text = "<|user|>\n a<|endoftext|> a"
    assert ours.encode(text, add_special_tokens=False).ids == expected


def test_sentence_pieces_are_merged_by_their_merges(tmp_path: Path) -> None:
    """As Gemma 4's files have them, without scores and a space before every text.

    A BOS is put before it even where the file states that there is none.
    """
    theirs = sentence_pieces()
    theirs.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    said = json.loads(theirs.to_str())["model"]
    vocabulary = said["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    changes = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.add_bos_token": False,
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
