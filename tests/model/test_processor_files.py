"""Which of a folder's files says how images are made: the one that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.processor_files import read_image_processor

OLDER: dict[str, Any] = {"size": {"height": 1, "width": 1}}
NEWER: dict[str, Any] = {"size": {"height": 2, "width": 2}}


@pytest.mark.parametrize("alone", [None, OLDER])
@pytest.mark.parametrize("whole", [None, {"image_seq_length": 3}, {"image_processor": NEWER}])
def test_the_file_is_that_of_transformers(
    tmp_path: Path, alone: dict[str, Any] | None, whole: dict[str, Any] | None
) -> None:
    from transformers.image_processing_base import ImageProcessingMixin

    files = {"preprocessor_config.json": alone, "processor_config.json": whole}
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    try:
        expected, _ = ImageProcessingMixin.get_image_processor_dict(tmp_path)
    except OSError:
        expected = None
    assert read_image_processor(tmp_path) == expected


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"processor_config\.json cannot be read"):
        read_image_processor(tmp_path)
