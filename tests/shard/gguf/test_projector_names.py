"""Names of types and tensors of projectors are those that the `gguf` package gives them.

The files of other tests take some names from their own table: here both are held to the package's.
"""

from __future__ import annotations

import re

import pytest

from tests.shard.gguf.files import gguf
from tgi_trio.model.gguf.projectors.table import PROJECTORS

KNOWN = {
    gguf.TENSOR_NAMES[tensor].replace("{bid}", "{}")
    for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.MMPROJ]
}
_ENDING = re.compile(r"\.(weight|bias|(input|output)_(min|max))$")


@pytest.mark.parametrize("kind", PROJECTORS)
def test_names_are_those_of_the_package(kind: str) -> None:
    assert kind in vars(gguf.VisionProjectorType).values()
    projector = PROJECTORS[kind]
    parts = ((names,) if isinstance(names, str) else names for names in projector.names.values())
    stored = {name for names in parts for name in names} | {projector.output[0], *projector.unread}
    plain = {_ENDING.sub("", name) for name in stored}
    numbered = {re.sub(r"^mm\.\d+$", "mm.{}", re.sub(r"(mlp)\.\d+$", r"\1.{}", n)) for n in plain}
    assert numbered <= KNOWN
