"""Small tokenizers of every kind in use, trained on the spot."""

# ruff: noqa: RUF001 - any script may come

from __future__ import annotations

import functools
import json
from pathlib import Path

from hypothesis import settings
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tgi_trio.router.text.tokenizer import Tokenizer as ServedTokenizer
from tgi_trio.router.text.tokenizer_files import TokenizerConfig

CORPUS = [
    "The server keeps a batch of sequences and steps through them, one token at a time.",
    "A stop string may begin in one token and end in another; isn't that right? Yes, it is.",
    "def decode(ids):\n    return ''.join(table[i] for i in ids)\n\n\tif x == 10: pass",
    "Die Größe der Straße läßt sich nicht ändern. Où est l'élève? ¿Qué pasa, señor?",
    "日本語のテキストを少しずつ出力する。中文文本也要逐字输出。한국어도 마찬가지입니다.",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם. नमस्ते दुनिया. สวัสดีชาวโลก",
    "😀 👍🏽 👩‍👩‍👧‍👦 🇫🇷 é e\u0301 \u200b\ufeff ½ € 𝔘𝔫𝔦",
]
SPECIAL = ["<s>", "</s>", "<|user|>"]


def _trained(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_special_tokens([token for token in SPECIAL])
    return tokenizer


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    _trained(tokenizer, trainer)
    # Added tokens stand for themselves where the byte alphabet does not cover them.
    tokenizer.add_tokens([AddedToken("  \n", normalized=False), AddedToken("<think>")])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama 2, Mistral, Gemma: BPE over characters, bytes where there is none."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<unk>"],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for token in byte_tokens:
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT: words get a space, continuations lose their mark, punctuation is drawn close."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    trainer = trainers.WordPieceTrainer(
        vocab_size=420, special_tokens=["[UNK]"], show_progress=False
    )
    return _trained(tokenizer, trainer)


def unigram() -> Tokenizer:
    """T5, XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    return _trained(tokenizer, trainer)


def byte_level_among_others() -> Tokenizer:
    """A decoder that only the window can follow, over bytes."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


BACKENDS = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "wordpiece": wordpiece,
    "unigram": unigram,
    "window_over_bytes": byte_level_among_others,
}
unhurried = settings(deadline=None)  # for properties: a busy machine is no failure
NO_CONFIG = TokenizerConfig(special_tokens={}, added_tokens=(), chat_templates={})


@functools.cache
def served(kind: str) -> ServedTokenizer:
    """Return one tokenizer per kind; tests only read it."""
    return ServedTokenizer(BACKENDS[kind](), NO_CONFIG)


def save(backend: Tokenizer, folder: Path, **config: object) -> Path:
    """Write a model folder's tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
