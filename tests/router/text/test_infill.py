"""How gaps are written, by the tokens that a model has for them."""

# ruff: noqa: RUF001 - DeepSeek's own marks have a bar of full width

from __future__ import annotations

import json
from typing import Any

import pytest
import sentencepiece

from tgi_trio.router.text.infill import FORMATS, Gap, InfillFormat, OtherFile, find_infill
from tgi_trio.router.text.tokenizer import Tokenizer

# As the models' own documents write the gap of `a = |b`, in the order of the table.
WRITTEN = (
    "<|fim_prefix|>a = <|fim_suffix|>b<|fim_middle|>",
    "<fim_prefix>a = <fim_suffix>b<fim_middle>",
    "<fim-prefix>a = <fim-suffix>b<fim-middle>",
    "<｜fim▁begin｜>a = <｜fim▁hole｜>b<｜fim▁end｜>",
    "<[fim-suffix]>b<[fim-prefix]>a = <[fim-middle]>",
    "<|code_prefix|>a = <|code_suffix|>b<|code_middle|>",
    "[SUFFIX]b[PREFIX]a = ",
    "▁<PRE>a = ▁<SUF>b▁<MID>",
)


@pytest.mark.parametrize(("name", "written"), [*zip(FORMATS, WRITTEN, strict=True)])
def test_a_gap_is_written_as_the_model_was_taught(name: str, written: str) -> None:
    found = find_infill({mark: i for i, mark in enumerate(FORMATS[name].marks)})
    assert found is FORMATS[name]
    assert found.write(Gap("a = ", "b"), found.marks) == written


@pytest.mark.parametrize("name", FORMATS)
def test_all_marks_are_needed(name: str) -> None:
    marks = FORMATS[name].marks
    for missing in marks:
        assert find_infill({mark: 0 for mark in marks if mark != missing}) is None


def test_a_gap_ends_where_another_file_would_begin() -> None:
    found = find_infill({"<|fim_prefix|>": 5, "<|fim_suffix|>": 6, "<|fim_middle|>": 7})
    assert found is not None
    added = {"<|fim_prefix|>": 5, "<|fim_suffix|>": 6, "<|fim_middle|>": 7, "<|file_sep|>": 9}
    assert found.end_ids(added) == (5, 6, 7, 9)


OTHERS = (OtherFile("x = 1\n", "one.py"), OtherFile("y = 2\n", "two.py"))


def find_format(*tokens: str) -> tuple[InfillFormat, dict[str, int]]:
    added = {token: i for i, token in enumerate(tokens)}
    found = find_infill(added)
    assert found is not None
    return found, added


def test_other_files_are_written_as_qwen_was_taught() -> None:
    """As its own documents have it, and llama.cpp's `/infill`, names included."""
    qwen = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
    found, added = find_format(*qwen)
    assert found.write(Gap("a = ", "b", OTHERS), added) == (
        "<|repo_name|>myproject\n<|file_sep|>one.py\nx = 1\n<|file_sep|>two.py\ny = 2\n"
        "<|file_sep|>filename\n<|fim_prefix|>a = <|fim_suffix|>b<|fim_middle|>"
    )
    # The same beginning without any: what is cached of it serves both.
    assert found.write(Gap("", "", ()), added) == (
        "<|repo_name|>myproject\n<|file_sep|>filename\n<|fim_prefix|><|fim_suffix|><|fim_middle|>"
    )


def test_starcoder_2_has_the_name_in_the_gap() -> None:
    """Lozhkov et al., 2024, https://arxiv.org/abs/2402.19173, section 5.1."""
    stars = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>")
    found, added = find_format(*stars)
    assert found.write(Gap("a = ", "b", OTHERS[:1]), added) == (
        "<repo_name>myproject\n<file_sep>one.py\nx = 1\n<file_sep>"
        "<fim_prefix>filename\na = <fim_suffix>b<fim_middle>"
    )


@pytest.mark.parametrize("name", FORMATS)
def test_files_are_plain_text_for_models_without_tokens_for_them(name: str) -> None:
    form = FORMATS[name]
    assert form.write(Gap("a = ", "b", OTHERS[:1]), form.marks) == (
        "\n\n--- one.py ---\n\nx = 1\n" + form.write(Gap("a = ", "b"), form.marks)
    )
    assert form.write(Gap("a", "b", ()), form.marks) == form.write(Gap("a", "b"), form.marks)


LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
CODE = ["def add(x, y):", "    return x + y", "print(add(1, 2))", "for x in range(y):", "  x = y"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    """A tokenizer like CodeLlama's, as SentencePiece reads it and as the server does."""
    folder = tmp_path_factory.mktemp("llama")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CODE * 20),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        split_digits=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    size = reference.get_piece_size()
    added = {str(size + i): {"content": mark, "special": True} for i, mark in enumerate(LLAMA)}
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    text = json.dumps({**config, **names, "added_tokens_decoder": added})
    (folder / "tokenizer_config.json").write_text(text)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return reference, Tokenizer.from_folder(folder, cache=folder / "cache")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("before", ["def add(x, y):\n    return ", "  x", "x", ""])
@pytest.mark.parametrize("behind", ["x + y", " x + y", "\nprint(add(1, 2))\n", "  x", ""])
def test_codellama_reads_a_gap_as_its_authors_code_does(
    llama: tuple[Any, Tokenizer], before: str, behind: str
) -> None:
    """`infilling_prompt_tokens` of Meta's codellama, with SentencePiece itself."""
    reference, tokenizer = llama
    found = find_infill(tokenizer.added_tokens)
    assert found is FORMATS["CodeLlama"] and found.continues
    marks = [tokenizer.added_tokens[mark] for mark in LLAMA]
    wanted = [
        *(reference.bos_id(), marks[0], *reference.encode(before)),
        *(marks[1], *reference.encode("\u263a" + behind)[2 + 2 :]),
        marks[2],
    ]
    assert found.encode(Gap(before, behind), tokenizer) == wanted
    assert found.end_ids(tokenizer.added_tokens)[-1] == marks[3]
