"""EXL3: codebooks by their formulas, and what its tensors say of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.shard.checkpoint.quantised_cases import CASES, Case, open_matrix
from tests.support.exl3 import EXL3, number_of, store_exl3
from tests.support.quantised import Tensors
from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.checkpoint.formats.exl3 import BY_NAME, list_numbers

# By hand: 3INST of state 0 adds the halves of 0x03D45AA4 as they are changed, 0x38B4 and 0x31C4;
# MCG those of 0, 0x3B60 twice; of MUL1 no bytes are added to 1024, and for state 1 those of 605.
GOLDEN = {
    ("3inst", 0): (1 + 180 / 1024) / 2 + (1 + 452 / 1024) / 8,
    ("mcg", 0): 2 * (1 + 864 / 1024) / 2,
    ("mul1", 0): np.float16(1024 * 1774 / 2**18 - 1329 / 2**7),
    ("mul1", 1): np.float16((1024 + 0x83 + 0xDC + 0xD1 + 0x2D) * 1774 / 2**18 - 1329 / 2**7),
}


@pytest.mark.parametrize("book", BY_NAME)
def test_numbers_of_codebooks_are_those_of_their_formulas(book: str) -> None:
    numbers = list_numbers(BY_NAME[book])
    states = [*range(40), *np.random.default_rng(1).integers(0, 1 << 16, 2000).tolist(), 65535]
    assert [numbers[state] for state in states] == [number_of(state, book) for state in states]
    assert abs(numbers.mean()) < 0.02 and 1 < numbers.std() < 1.3
    for (name, state), number in GOLDEN.items():
        if name == book:
            assert numbers[state] == number


@pytest.mark.parametrize("bits", [2, 3, 6])
def test_what_is_padded(tmp_path: Path, bits: int) -> None:
    """Outputs, as heads with any vocabulary are, and inputs."""
    weight = np.random.default_rng(3).standard_normal((300, 200), np.float32)
    tensors, exact = store_exl3(bits)("a", weight)
    assert tensors["a.trellis"].shape == (16, 24, 16 * bits)
    matrix = open_matrix(tmp_path, Case(EXL3, tensors, exact, bits, 128))
    np.testing.assert_array_equal(matrix.dequantised(), exact)
    part = matrix.rows(slice(250, 300)).columns(slice(130, 200))
    np.testing.assert_array_equal(part.dequantised(), exact[250:, 130:])


DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "bits": (
        lambda t: t.update({"a.trellis": t["a.trellis"][:, :, :60].clone()}),
        r"'a.trellis' in .* has shape \[8, 8, 60\], but EXL3 asks for tiles of 16 to 128 words",
    ),
    "half": (
        lambda t: t.update({"a.trellis": t["a.trellis"][:, :, :56].clone()}),
        r"'a.weight' in .* has 3.5 bits and the codebook mcg; .* half a bit with mul1 alone",
    ),
    "shape": (
        lambda t: t.update({"a.trellis": t["a.trellis"][1:]}),
        r"'a.trellis' in .* has shape \[7, 8, 64\], but .* asks for \[8, 8, 64\]",
    ),
    "books": (
        lambda t: t.update({"a.mul1": t["a.mcg"].clone()}),
        "has 4 bits and the codebook mcg and mul1; a matrix of EXL3 has one codebook",
    ),
    "factor": (
        lambda t: t["a.mcg"].fill_(5),
        "'a.mcg' in .* says a factor of 0x5; the codebook mcg that is read has 0xcbac1fed",
    ),
    "scale": (
        lambda t: t.update({"a.scale": torch.ones(1)}),
        "'a.weight' of 96 x 128 cannot be stored as EXL3: .* no scale of the whole matrix",
    ),
    "nan": (lambda t: t["a.svh"][3].fill_(np.nan), "'a.svh' in .* holds a scale that is infinite"),
    "missing": (lambda t: t.pop("a.suh"), "'a.suh' is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_describes_a_matrix_is_checked(tmp_path: Path, damage: str) -> None:
    case = CASES["exl3, 4 bits, mcg"]()
    change, message = DAMAGES[damage]
    change(case.tensors)
    with pytest.raises(ModelLoadError, match=message):
        open_matrix(tmp_path, case).dequantised()


def test_an_unknown_codebook_is_refused_by_name(tmp_path: Path) -> None:
    case = CASES["exl3, 4 bits, mcg"]()
    case.said["codebook"] = "4mad"
    with pytest.raises(ModelLoadError, match="says codebook '4mad' of EXL3; read are 3inst, mcg"):
        open_matrix(tmp_path, case)
