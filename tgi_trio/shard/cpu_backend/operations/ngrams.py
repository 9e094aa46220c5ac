"""The operations of n-gram embeddings, which a layer adds to all hidden states of a token."""

from __future__ import annotations

from typing import Any

import numpy as np

from tgi_trio.model.matrices.references import every_unit
from tgi_trio.model.matrices.roles import NgramsRefs
from tgi_trio.model.specs.ngrams import NgramsSpec
from tgi_trio.shard.checkpoint.lookup import read_table
from tgi_trio.shard.cpu_backend.operations.norms import NormWriter
from tgi_trio.shard.cpu_backend.operations.states import NUMBER, by_lanes, read_numbers
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.packing import to_storage
from tgi_trio.shard.cpu_backend.tables import NGRAMS, Buffer, Code


def add_ngrams(
    writer: OperationWriter,
    norms: NormWriter,
    refs: NgramsRefs,
    ngrams: NgramsSpec,
    hidden: int,
    *,
    bf16: bool,
) -> None:
    """Add n-grams to the hidden states in STREAMS, of `hidden` numbers each.

    Raises ModelLoadError as the weights do.
    """
    facts = _describe(writer, refs, ngrams, bf16=bf16)
    for name in ("query_norm", "key_norm", "kernel_norm"):
        facts[name] = norms.keep_weight(getattr(refs, name))
    facts["count"] = count = ngrams.channels // hidden
    kept = writer.keep(facts)
    writer.add(Code.HASH, target=Buffer.FOUND, facts=kept, state_bytes=(ngrams.order - 1) * NUMBER)
    writer.add(Code.LOOK_UP, target=Buffer.NORMED, width=ngrams.width, facts=kept)
    writer.linear(refs.inner, Buffer.NORMED, Buffer.PROJECTED)
    common = {"inputs": (count + 1) * hidden, "width": hidden, "facts": kept}
    writer.add(Code.WEIGH, target=Buffer.STREAMS, eps=refs.query_norm.eps, **common)
    before = (ngrams.taps - 1) * ngrams.order
    state_bytes = before * ngrams.channels * NUMBER
    writer.add(Code.SPREAD_OUT, target=Buffer.STREAMS, state_bytes=state_bytes, **common)


def _describe(
    writer: OperationWriter, refs: NgramsRefs, ngrams: NgramsSpec, *, bf16: bool
) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return the record of a layer's n-grams, without its norms."""
    parts = read_table(writer.source, refs.table, every_unit).parts
    # They stay where the files are mapped, if they have the model's dtype.
    tables = [to_storage(part.dequantised(), bf16) for part in parts]
    places = [writer.keep(table) for table in tables]
    facts = np.zeros((1,), NGRAMS)
    facts["order"], facts["heads"], facts["end"] = ngrams.order, ngrams.heads, ngrams.end
    for name, numbers in (
        ("factors", ngrams.factors),
        ("rows", ngrams.rows),
        ("firsts", ngrams.firsts),
        ("parts", places),
    ):
        facts[name] = writer.keep(np.array(numbers, np.int64))
    facts["part_rows"], facts["size"] = len(tables[0]), ngrams.width // ngrams.heads
    facts["kernel"] = writer.keep(by_lanes(read_numbers(writer, refs.kernel)[:, 0]))
    facts["taps"] = ngrams.taps
    return facts
