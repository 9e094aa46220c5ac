"""The table of formats and backends has a row for everything that the code's tables have."""

from __future__ import annotations

import numpy as np
import pytest

from tgi_trio.shard.checkpoint.formats.gguf import FUNCTIONS
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.checkpoint.rounding.encoding import round_matrix
from tgi_trio.shard.checkpoint.unpacked import UNPACKED_CODINGS, unpack_matrix
from tgi_trio.shard.cpu_backend.kinds.table import KINDS, find_packing
from tools.docs.backends import BLOCKS, OF_FORMATS, render_backends

ROWS = {
    cells[0].strip("`"): cells
    for line in render_backends().splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


def test_every_way_of_storing_weights_has_a_row() -> None:
    codings = {*UNPACKED_CODINGS, *BLOCKS, *(encoding.coding for encoding in ENCODINGS.values())}
    codings |= {name.split()[0] for name in KINDS}
    assert ROWS.keys() == codings | OF_FORMATS.keys()
    assert FUNCTIONS.keys() == set(BLOCKS)


@pytest.mark.parametrize("word", ENCODINGS)
def test_what_is_made_is_computed_as_its_row_says(word: str) -> None:
    matrix = round_matrix(PlainMatrix(np.ones((64, 256), np.float32)), ENCODINGS[word])
    row = ROWS[matrix.coding]
    assert (unpack_matrix(matrix) is not None) == (row[3] == "codes")
    assert (find_packing(matrix) is not None) == row[2].startswith("as stored")
