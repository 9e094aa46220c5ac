"""Errors call a model's name what the command calls it: some take it as a flag, some as a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tgi_trio import demo
from tgi_trio.cli.download import download_weights
from tgi_trio.cli.options import DownloadOptions, QuantizeOptions
from tgi_trio.cli.quantize import quantize
from tgi_trio.errors import ModelLoadError

COMMANDS: list[tuple[Callable[[Any], str], type]] = [
    (download_weights, DownloadOptions),
    (quantize, QuantizeOptions),
]


@pytest.mark.parametrize(("run", "options"), COMMANDS)
@pytest.mark.parametrize(
    ("model", "revision", "words"),
    [
        ("/nowhere/at-all", None, "there is no folder /nowhere/at-all: MODEL takes a folder"),
        ("https://hf.co/a/b", None, "is an address, and MODEL takes the name"),
        ("~no-such-user/m", None, "no such home folder. MODEL takes"),
        (demo.MODEL_ID, "main", "has no revision: give MODEL a hub repository"),
        ("two", None, "holds several GGUF files, each a model: MODEL takes one, such as"),
        ("two:Q4_K", None, "holds no GGUF files for 'Q4_K': MODEL takes one, such as"),
    ],
)
def test_the_word_is_named_where_there_is_no_flag(
    run: Callable[[Any], str],
    options: type,
    model: str,
    revision: str | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two").mkdir()
    for name in ("a-F32", "a-Q8_0"):
        Path("two", f"{name}.gguf").write_bytes(b"GGUF")
    more = {"output": Path("out")} if options is QuantizeOptions else {}
    with pytest.raises(ModelLoadError) as error:
        run(options(model_id=model, revision=revision, **more))
    assert words in str(error.value) and "--model-id" not in str(error.value)
