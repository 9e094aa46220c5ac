"""Texts in which names of special tokens are mere text, against what the library does itself."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tgi_trio.router.text.plain_reading import PlainReader, has_any, special_names
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.router.text.tokenizer_files import TokenizerConfig

SPECIAL = ("<s>", "</s>", "<|fim_middle|>", "<|fim_middle|>x")
PLAIN = ("<tool>",)
CORPUS = ["def add(x, y):\n    return x + y", "<|fim_middle|> fim_middle <s> </s>", "a  b"] * 9
TEXTS = (
    *("", "a", " a", "<|fim_middle|>", "a <|fim_middle|> b", "<s><s>", "x</s>\n", "<tool>a"),
    *("<|fim_middle|>xy", "  <s>  </s>  ", "<|fim_mid", "\u2581<s>", "\n<|fim_middle|>x</s><tool>"),
)


def byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def like_llama() -> tokenizers.Tokenizer:
    """With a space in front of every text, and one in front of what stands behind a token."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return made


def first_only() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return made


@pytest.fixture(params=[byte_level, like_llama, first_only], ids=lambda each: each.__name__)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made = request.param()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    made.add_tokens([tokenizers.AddedToken(text) for text in PLAIN])
    begin = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", begin)])
    return Tokenizer(made, TokenizerConfig({}, (), {}))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("adds", [True, False])
def test_names_are_read_as_the_library_reads_them_as_text(
    tokenizer: Tokenizer, text: str, adds: bool
) -> None:
    reference = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    reference.encode_special_tokens = True  # as text: what it calls so
    reader = PlainReader(tokenizer, SPECIAL)
    wanted = reference.encode(text, add_special_tokens=adds).ids
    assert reader.encode_ids(text, adds).tolist() == wanted


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_meant_is_read_as_ever(tokenizer: Tokenizer, text: str) -> None:
    reader = PlainReader(tokenizer, SPECIAL)
    spoken = reader.speak(text)
    assert reader.encode_ids(spoken).tolist() == tokenizer.encode_ids(text).tolist()


def test_a_name_that_is_meant_may_stand_beside_one_that_is_not(tokenizer: Tokenizer) -> None:
    reader = PlainReader(tokenizer, SPECIAL)
    name = "<|fim_middle|>"
    ids = reader.encode_ids(f"a{name}b{reader.name(name)}", add_special_tokens=False).tolist()
    assert ids.count(tokenizer.added_tokens[name]) == 1 == ids[-1:].count(ids[-1])
    assert ids[-1] == tokenizer.added_tokens[name]
    assert reader.added_tokens[reader.name(name)] == tokenizer.added_tokens[name]
    assert reader.name("<tool>") == "<tool>"


def test_names_that_no_user_means() -> None:
    made = byte_level()
    made.add_tokens(["<|fim_prefix|>", "<｜fim▁hole｜>", "<tool_call>", "<|", "  "])  # noqa: RUF001
    made.add_special_tokens(["[MIDDLE]"])
    found = special_names(Tokenizer(made, TokenizerConfig({}, (), {})))
    assert found == {"<|fim_prefix|>", "<｜fim▁hole｜>", "[MIDDLE]"}  # noqa: RUF001


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ((), False),
        (("a", "x<s"), False),
        (("a", "x<s>"), True),
        (("</s>",), True),
        (("<x>",), False),
    ],
)
def test_names_are_found_wherever_they_stand(texts: tuple[str, ...], found: bool) -> None:
    assert has_any(texts, {"<s>", "</s>"}) is found
