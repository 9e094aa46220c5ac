"""tokenizer.json and tokenizer_config.json of a GGUF file's vocabulary.

Three kinds of vocabulary are read, by `tokenizer.ggml.model`: "gpt2", byte-level BPE with its
merges; "llama", SentencePiece's BPE with a score for every piece; and "gemma4", the same with
merges. Others are refused by name: for them, --tokenizer-name takes the original model's tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from tgi_trio.model.gguf.header import refusing
from tgi_trio.model.gguf.pre_tokenizers import find_pre_tokenizer

Json = dict[str, Any]
Merges = Sequence[str] | Sequence[list[str]]  # two parts: with a space between them, or as a list

# Types of tokens, in `tokenizer.ggml.token_type`.
_NORMAL, _UNKNOWN, CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
# Special tokens, by the word in their id's key.
_ROLES: Final = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",  # the format's spelling
    "mask": "mask_token",
}
# What they are where a file does not state them, by its kind of vocabulary: as in llama.cpp
# (`llama_vocab::impl::load`; its server names `<s>` and `</s>` for such a file). For both of byte
# pairs it takes 11, a comma in GPT-2's: no file means that.
_DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = {"llama": {"bos": 1, "eos": 2}}
_SPACE: Final = "\u2581"  # SentencePiece's character for a space
_ADVICE: Final = "name the original model's tokenizer with --tokenizer-name"
# Tokens that end a turn, whatever the file states as EOS and as their type: llama.cpp recognises
# them by their text, too.
_ENDS: Final = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> "
    "<|return|> <|call|> <turn|> <|eot|> <|flush|> <|calls|> <end_of_utterance> <eos> "
    "<|tool_response> _<EOT> [EOT] [EOS] [e~[ <|ifm|im_end|> "
    "<\uff5cend\u2581of\u2581sentence\uff5c>".split()
)
# Where a turn has several messages, as gpt-oss' and Solar Open's, this ends one of them: a thought
# before the answer.
_MESSAGE_END: Final = "<|end|>"
_TURN_ENDS: Final = (
    {"<|return|>", "<|call|>"},
    {"<|flush|>", "<|call|>"},
    {"<|flush|>", "<|calls|>"},
)

_KEEPING: Final = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's tokens that leave white space


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The checked tokens of a file."""

    metadata: Mapping[str, Any]
    tokens: Sequence[str]
    types: Sequence[int]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def role(self, word: str) -> int | None:
        """Return the id of a special token, None if there is none."""
        default = _DEFAULTS.get(str(self.get("model")), {}).get(word)
        for token_id in (self.get(f"{word}_token_id"), default):
            if (
                isinstance(token_id, int)
                and not isinstance(token_id, bool)
                and 0 <= token_id < len(self.tokens)
            ):
                return token_id
        return None

    def unusual(self) -> Iterator[tuple[int, str, int]]:
        """Yield id, text and type of the few tokens that are not normal text."""
        for token_id, kind in enumerate(self.types):
            if kind != _NORMAL:
                yield token_id, self.tokens[token_id], kind


def read_vocabulary(metadata: Mapping[str, Any], file: Path) -> Vocabulary:
    """Return the tokens in a file's metadata; raises ModelLoadError if they make no sense."""
    with refusing(file):
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
            raise ValueError(f"it has no tokenizer.ggml.tokens; {_ADVICE}")
        types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
        if not isinstance(types, list) or len(types) != len(tokens):
            raise ValueError("its tokenizer.ggml.token_type is not as long as its tokens")
        return Vocabulary(metadata, tokens, _with_ends(tokens, types))


def _with_ends(tokens: Sequence[str], types: Sequence[int]) -> Sequence[int]:
    """Return the types with tokens that end a turn as control tokens.

    Files of fine-tuned models often have them as text, which a prompt would then be cut into, and
    an answer would end with.
    """
    wrong = [
        token_id
        for text in _ENDS.intersection(tokens)
        if types[token_id := tokens.index(text)] in (_NORMAL, _USER_DEFINED)
    ]
    if not wrong:
        return types
    changed = list(types)
    for token_id in wrong:
        changed[token_id] = CONTROL
    return changed


def make_tokenizer(vocabulary: Vocabulary, file: Path) -> Json:
    """Return tokenizer.json; raises ModelLoadError for an unsupported kind of vocabulary."""
    with refusing(file):
        kind = vocabulary.get("model")
        if kind == "gpt2":
            made = _byte_level(vocabulary)
        elif kind == "llama":
            made = _sentence_pieces(vocabulary, _merges(vocabulary), leading=True)
        elif kind == "gemma4":
            pairs = _stated_merges(vocabulary, _ids(vocabulary))
            made = _sentence_pieces(vocabulary, pairs, leading=False)
        else:
            raise ValueError(
                f"its tokenizer is of the kind {kind!r}; read are 'gpt2', 'llama' and 'gemma4'. "
                f"For others, {_ADVICE}"
            )
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(vocabulary),
            **made,
        }


def make_tokenizer_config(vocabulary: Vocabulary) -> Json:
    """Return tokenizer_config.json: special tokens and chat templates."""
    roles = {ours: vocabulary.role(word) for word, ours in _ROLES.items()}
    config: Json = {
        ours: vocabulary.tokens[token_id]
        for ours, token_id in roles.items()
        if token_id is not None
    }
    template = vocabulary.metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {
        key.removeprefix(prefix): text
        for key, text in vocabulary.metadata.items()
        if key.startswith(prefix) and isinstance(text, str)
    }
    if isinstance(template, str):
        named["default"] = template
    if named:
        config["chat_template"] = [{"name": n, "template": text} for n, text in named.items()]
    return config


def end_ids(vocabulary: Vocabulary) -> list[int]:
    """Return the ids of all tokens that end a text, EOS first."""
    named = (vocabulary.role(word) for word in ("eos", "eot", "eom"))
    told = {
        text: token_id
        for token_id, text, kind in vocabulary.unusual()
        if kind == CONTROL and text in _ENDS
    }
    found = dict.fromkeys([*(each for each in named if each is not None), *told.values()])
    if _MESSAGE_END in told and any(ends <= told.keys() for ends in _TURN_ENDS):
        del found[told[_MESSAGE_END]]
    return list(found)


def _added_tokens(vocabulary: Vocabulary) -> list[Json]:
    """Return the tokens that are matched in a text before anything else, special or not."""
    # Files do not state which of them take the white space behind them: Phi-3's do, and its chat
    # template writes a line break behind every one.
    taking = vocabulary.metadata.get("general.architecture") == "phi3"
    taking = taking and vocabulary.get("model") == "llama"
    return [
        {
            "id": token_id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": taking and text not in _KEEPING,
            "normalized": False,
            "special": kind in (CONTROL, _UNKNOWN),
        }
        for token_id, text, kind in vocabulary.unusual()
        if kind in (CONTROL, _UNKNOWN, _USER_DEFINED) and text
    ]


def _ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Return token -> id, in the order of ids; of tokens with the same text the first wins."""
    tokens, types = vocabulary.tokens, vocabulary.types
    found = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(found) == len(tokens) and _UNUSED not in types:
        return found
    backwards = range(len(tokens) - 1, -1, -1)  # of equal texts, the one written last stays
    found = {tokens[each]: each for each in backwards if types[each] != _UNUSED}
    return dict(reversed(found.items()))


def _model(ids: Mapping[str, int], merges: Merges, **options: Any) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": dict(ids),
        "merges": merges,
    } | options


def _byte_level(vocabulary: Vocabulary) -> Json:
    name = vocabulary.get("pre", "default")
    found = find_pre_tokenizer(name)
    if found is None:
        raise ValueError(
            f"its texts are cut in the way {name!r} (tokenizer.ggml.pre), which is not known here; "
            f"{_ADVICE}"
        )
    ids = _ids(vocabulary)
    return {
        "normalizer": found.normalizer,
        "pre_tokenizer": found.pre_tokenizer,
        "post_processor": _surrounded(vocabulary, found.begins_with_bos),
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True,
        },
        "model": _model(
            ids, _stated_merges(vocabulary, ids), ignore_merges=found.whole_words_first
        ),
    }  # fmt: skip


def _stated_merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[str]:
    merges = vocabulary.get("merges", [])  # absent in a vocabulary of single bytes
    if not isinstance(merges, list):
        raise ValueError("its tokenizer.ggml.merges are no list")
    texts = list(map(str, merges))  # hundreds of thousands
    pairs = [text.split(" ") for text in texts]
    if set(map(len, pairs)) - {2} or "" in chain.from_iterable(pairs):
        wrong = next(pair for pair in pairs if len(pair) != 2 or "" in pair)
        raise ValueError(f"its merge {' '.join(wrong)!r} is not of two parts")
    # Other merges produce no token.
    return [
        text
        for text, (left, right) in zip(texts, pairs, strict=True)
        if left in ids and right in ids and left + right in ids
    ]


def _sentence_pieces(vocabulary: Vocabulary, merges: Merges, *, leading: bool) -> Json:
    """`leading`: whether a space is put before a text, if the file does not state it."""
    ids = _ids(vocabulary)
    unknown = vocabulary.role("unknown")
    leading = bool(vocabulary.get("add_space_prefix", leading))
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepended = [{"type": "Prepend", "prepend": _SPACE}] if leading else []
    stripped = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if leading else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepended, replaced]},
        "pre_tokenizer": None,
        "post_processor": _surrounded(vocabulary, True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *stripped,
            ],
        },
        "model": _model(
            ids,
            merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in vocabulary.types,
        ),
    }


def _merges(vocabulary: Vocabulary) -> list[list[str]]:
    """Return the merges that join pieces in the order of their scores, as SentencePiece does.

    It first joins the pair whose result has the best score. Raises ValueError without scores.
    """
    scores = vocabulary.get("scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise ValueError("its tokenizer.ggml.scores are not as many as its tokens")
    if not all(isinstance(score, (int, float)) for score in scores):
        raise ValueError("its tokenizer.ggml.scores are not numbers")
    pieces = {
        text: token_id
        for token_id, (text, kind) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, strict=True)
        )
        if kind in (_NORMAL, _USER_DEFINED)
    }
    found: list[tuple[float, int, int, int, str, str]] = []
    for text, token_id in pieces.items():
        for place in range(1, len(text)):
            left, right = pieces.get(text[:place]), pieces.get(text[place:])
            if left is not None and right is not None:
                halves = text[:place], text[place:]
                found.append((-scores[token_id], token_id, left, right, *halves))
    found.sort()
    return [[left, right] for *_, left, right in found]


def _surrounded(vocabulary: Vocabulary, begins: bool) -> Json | None:
    """Return the post-processor that adds BOS and EOS; `begins`: the default for BOS."""
    bos, eos = vocabulary.role("bos"), vocabulary.role("eos")
    # Some files of Gemma 4 state that it has no BOS before a text; llama.cpp overrides that, too.
    wanted = bool(vocabulary.get("add_bos_token", begins)) or vocabulary.get("model") == "gemma4"
    before = bos is not None and wanted
    behind = eos is not None and bool(vocabulary.get("add_eos_token", False))
    used = [each for each, wanted in ((bos, before), (eos, behind)) if wanted and each is not None]
    if not used:
        return None

    def surround(kind: int, letter: str) -> list[Json]:
        def special(token_id: int | None) -> Json:
            return {"SpecialToken": {"id": vocabulary.tokens[token_id or 0], "type_id": kind}}

        text = {"Sequence": {"id": letter, "type_id": kind}}
        return [*([special(bos)] if before else []), text, *([special(eos)] if behind else [])]

    return {
        "type": "TemplateProcessing",
        "single": surround(0, "A"),
        "pair": surround(0, "A") + surround(1, "B"),
        "special_tokens": {
            vocabulary.tokens[each]: {
                "id": vocabulary.tokens[each],
                "ids": [each],
                "tokens": [vocabulary.tokens[each]],
            }
            for each in used
        },
    }
