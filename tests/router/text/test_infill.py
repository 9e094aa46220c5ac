"""How gaps are written, by the tokens that a model has for them."""

# ruff: noqa: RUF001 - DeepSeek's own marks have a bar of full width

from __future__ import annotations

import pytest

from tgi_trio.router.text.infill import FORMATS, Gap, InfillFormat, OtherFile, find_infill

# As the models' own documents write the gap of `a = |b`, in the order of the table.
WRITTEN = (
    "<|fim_prefix|>a = <|fim_suffix|>b<|fim_middle|>",
    "<fim_prefix>a = <fim_suffix>b<fim_middle>",
    "<fim-prefix>a = <fim-suffix>b<fim-middle>",
    "<｜fim▁begin｜>a = <｜fim▁hole｜>b<｜fim▁end｜>",
    "<[fim-suffix]>b<[fim-prefix]>a = <[fim-middle]>",
    "<|code_prefix|>a = <|code_suffix|>b<|code_middle|>",
    "[SUFFIX]b[PREFIX]a = ",
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


def format_of(*tokens: str) -> tuple[InfillFormat, dict[str, int]]:
    added = {token: i for i, token in enumerate(tokens)}
    found = find_infill(added)
    assert found is not None
    return found, added


def test_other_files_are_written_as_qwen_was_taught() -> None:
    """As its own documents have it, and llama.cpp's `/infill`, names included."""
    qwen = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
    found, added = format_of(*qwen)
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
    found, added = format_of(*stars)
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
