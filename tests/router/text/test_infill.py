"""How gaps are written, by the tokens that a model has for them."""

# ruff: noqa: RUF001 - DeepSeek's own marks have a bar of full width

from __future__ import annotations

import pytest

from tgi_trio.router.text.infill import FORMATS, find_infill

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
    assert found.write("a = ", "b") == written


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
