"""Every architecture that is read: a file of a model's weights gives the model's own tokens.

What the files hold is made by `converted_first.py`, or by `converted.py` for newer architectures.
What the weights mean is said by transformers, from the model's folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shard.gguf.cases_first import ARCHITECTURE, FAMILIES
from tests.shard.gguf.converted import MODELS
from tests.shard.gguf.converted_first import made
from tests.shard.gguf.files import answers, write
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import read_config
from tgi_trio.model.gguf.architectures import ARCHITECTURES
from tgi_trio.model.gguf.folder import gguf_folder

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_architecture_is_tested() -> None:
    own = {ARCHITECTURE.get(case, case) for case in FAMILIES}
    assert own | MODELS.keys() == ARCHITECTURES.keys()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", FAMILIES)
def test_tokens_and_logits_are_those_of_the_source(
    checkpoint: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    name, source, said, arrays = made(checkpoint, case)
    file = tmp_path / "model.gguf"
    write(file, name, said, arrays)
    rows, recorder = answers(file, tmp_path)
    golden = Golden(source)
    for row in rows:
        assert_greedy(golden, recorder, row, tolerance=2e-4)


@pytest.mark.parametrize(("vocabulary", "activation"), [("llama", "silu"), ("gpt2", "relu2")])
def test_a_vocabulary_says_how_bitnet_activates(
    checkpoint: Callable[..., Path], tmp_path: Path, vocabulary: str, activation: str
) -> None:
    name, _, said, arrays = made(checkpoint, "bitnet")
    write(tmp_path / "a.gguf", name, said | {"tokenizer.ggml.model": vocabulary}, arrays)
    folder = gguf_folder(tmp_path / "a.gguf", tmp_path / "cache", tokenizer=False)
    assert read_config(folder).get("hidden_act") == activation


def test_rates_of_decay_that_cannot_be_are_refused(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    name, _, said, arrays = made(checkpoint, "granitehybrid")
    arrays["blk.0.ssm_a"][1] = 0.0
    write(tmp_path / "model.gguf", name, said, arrays)
    with pytest.raises(ModelLoadError, match="a rate of decay in the GGUF file is not below 0"):
        answers(tmp_path / "model.gguf", tmp_path)
