"""A tokenizer that is a pickle is refused, and never run: to read a pickle is to run it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from tgi_trio import demo
from tgi_trio.errors import ModelLoadError
from tgi_trio.router.text.tokenizer_files import tokenizer_json
from tgi_trio.router.text.tokenizer_shape import check_tokenizer_json


class _Trap:
    """Makes a folder as it is read."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tokenizer.json", "tokenizer.json cannot be loaded as a tokenizer"),
        ("tokenizer.model", "tokenizer"),
        ("tokenizer.pkl", "holds no tokenizer"),
        ("tokenizer_config.json", "tokenizer_config.json cannot be read"),
    ],
)
def test_a_pickle_is_refused_and_not_run(tmp_path: Path, name: str, reason: str) -> None:
    folder, marker = tmp_path / "model", tmp_path / "marker"
    folder.mkdir()
    (folder / "config.json").write_bytes((demo.model_path() / "config.json").read_bytes())
    (folder / name).write_bytes(pickle.dumps(_Trap(marker)))
    with pytest.raises(ModelLoadError, match=reason):
        check_tokenizer_json(tokenizer_json(folder, tmp_path / "cache"))
    assert not marker.exists()
    pickle.loads((folder / name).read_bytes())  # the trap is one
    assert marker.exists()
