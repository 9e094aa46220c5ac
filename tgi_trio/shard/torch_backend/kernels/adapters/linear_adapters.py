"""LoRA adapters: y += B (A x), where each run of rows has its own A and B.

Adapters with DoRA or biases also have gains and offsets: gains * y + offsets is added as well.

One pair of kernels serves any mixture of adapters (Punica's SGMV and BGMV, arXiv 2310.18547, in
one). The host lists *tiles*, neighbouring rows with the same adapter. Where an adapter lies is read
on the device, so a launch is the same whichever adapters rows have.
`layers/adapters/slotted_linear.py` launches the kernels; `layers/adapters/adapter_layout.py`
describes slots and their directory.

The order of a row's sums does not depend on other rows: the others in its tile are other rows of a
matrix product, and programs that share a row's inputs (split-K) store their sums separately, to be
added in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ENTRY = tl.constexpr(5)  # numbers of a directory entry
_UNIT = tl.constexpr(16)  # numbers in a unit of the offsets


@triton.jit(do_not_specialize=["tokens", "first"])
def shrink_rows(
    low,  # float32 [parts, tokens, PIECES, RANKS]: A x, for each part of the inputs
    x,  # [tokens, inputs], contiguous
    numbers,  # [slots, capacity]
    directory,  # int32 [slots, entries, 5]
    tiles,  # int32 [programs, 3]: slot, first token, tokens; no tokens: nothing to do
    tokens,
    inputs,
    capacity,
    entries,
    first,  # directory entry of the linear layer's first piece
    PIECES: tl.constexpr,
    RANKS: tl.constexpr,  # the largest, a multiple of STEP
    ROWS: tl.constexpr,  # of a tile
    STEP: tl.constexpr,  # ranks of a program
    DEPTH: tl.constexpr,  # inputs of one step of the loop
):
    """Multiply a tile's rows by some ranks of its adapter's A, over a part of the inputs."""
    count = tl.load(tiles + 3 * tl.program_id(0) + 2)
    if count > 0:
        slot = tl.load(tiles + 3 * tl.program_id(0)).to(tl.int64)
        begin = tl.load(tiles + 3 * tl.program_id(0) + 1)
        piece = tl.program_id(1) // (RANKS // STEP)
        rank = tl.program_id(1) % (RANKS // STEP) * STEP + tl.arange(0, STEP)
        entry = directory + (slot * entries + first + piece) * _ENTRY
        block = tl.load(entry)
        ranks = tl.load(entry + 1)
        if (block == piece) & (tl.program_id(1) % (RANKS // STEP) * STEP < ranks):
            matrix = numbers + slot * capacity + tl.load(entry + 2).to(tl.int64) * _UNIT
            place = tl.arange(0, ROWS)
            real = place < count
            row = tl.where(real, begin + place, begin).to(tl.int64)
            each = tl.cdiv(tl.cdiv(inputs, DEPTH), tl.num_programs(2)) * DEPTH
            lowest = tl.program_id(2) * each
            end = tl.minimum(lowest + each, inputs)
            total = multiply_low(
                x, matrix, row, real, rank, ranks, inputs, lowest, end, ROWS, STEP, DEPTH
            )
            at = ((tl.program_id(2).to(tl.int64) * tokens + row) * PIECES + piece) * RANKS
            stored = real[:, None] & (rank < ranks)[None, :]
            tl.store(low + at[:, None] + rank[None, :], total, mask=stored)


@triton.jit(do_not_specialize=["tokens", "first", "second", "third", "parts"])
def expand_rows(
    out,  # [tokens, outputs], contiguous: added to, in place
    low,  # float32 [parts, tokens, PIECES, RANKS], of `shrink_rows`
    numbers,  # [slots, capacity]
    directory,  # int32 [slots, entries, 5]
    tiles,  # int32 [programs, 3]
    tokens,
    outputs,
    capacity,
    entries,
    first,
    second,  # where the second and third pieces' outputs begin; `outputs` if there is none
    third,
    starts,  # int32 [PIECES]: where all begin, read for those behind the third
    parts,
    PIECES: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,  # of a tile
    DEPTH: tl.constexpr,  # ranks of one step of the loop; divides RANKS
):
    """Multiply the results of `shrink_rows` by B, and change a tile of outputs by an adapter."""
    count = tl.load(tiles + 3 * tl.program_id(0) + 2)
    if count > 0:
        slot = tl.load(tiles + 3 * tl.program_id(0)).to(tl.int64)
        place = tl.arange(0, ROWS)
        real = place < count
        begin = tl.load(tiles + 3 * tl.program_id(0) + 1)
        row = tl.where(real, begin + place, begin).to(tl.int64)
        lowest = tl.program_id(1) * OUTPUTS
        column = lowest + tl.arange(0, OUTPUTS)
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        # Whether anything is added: to most heads nothing is. More pieces have no register for it.
        changes = count > 0 if PIECES > 2 else count < 0
        for piece in tl.static_range(PIECES):
            start = find_start(piece, second, third, starts)
            end = outputs
            if piece + 1 < PIECES:
                end = find_start(piece + 1, second, third, starts)
            entry = directory + (slot * entries + first + piece) * _ENTRY
            ranks = tl.multiple_of(tl.load(entry + 1), _UNIT)
            if (lowest < end) & (lowest + OUTPUTS > start) & (ranks > 0):
                changes = count > 0
                block = tl.load(entry)
                matrix = numbers + slot * capacity + tl.load(entry + 3).to(tl.int64) * _UNIT
                own = (column >= start) & (column < end)
                total = add_product(
                    *(total, low, row, block, tokens, parts, matrix, column - start, real, own),
                    *(ranks, PIECES, RANKS, ROWS, DEPTH, False),
                )
        if changes:
            gain = tl.zeros([OUTPUTS], tl.float32)
            offset = tl.zeros([OUTPUTS], tl.float32)
            for piece in tl.static_range(PIECES):  # not above, where registers are few
                start = find_start(piece, second, third, starts)
                end = outputs
                if piece + 1 < PIECES:
                    end = find_start(piece + 1, second, third, starts)
                at = tl.load(directory + (slot * entries + first + piece) * _ENTRY + 4)
                if (lowest < end) & (lowest + OUTPUTS > start) & (at > 0):
                    own = (column >= start) & (column < end)
                    gains = numbers + slot * capacity + at.to(tl.int64) * _UNIT + (column - start)
                    gain += tl.load(gains, mask=own, other=0.0).to(tl.float32)
                    offset += tl.load(gains + (end - start), mask=own, other=0.0).to(tl.float32)
            where = out + row[:, None] * outputs + column[None, :]
            stored = real[:, None] & (column < outputs)[None, :]
            y = tl.load(where, mask=stored, other=0.0).to(tl.float32)
            y += y * gain[None, :] + offset[None, :] + total
            tl.store(where, y.to(out.dtype.element_ty), mask=stored)


@triton.jit
def place_embeddings(
    x,  # [tokens, width], contiguous: changed in place
    token_ids,  # int64 [tokens]
    tokens,  # int64 [slots, RANKS]: those of which adapters have embeddings; -1: none
    rows,  # [slots, RANKS, width]: these embeddings
    tiles,  # int32 [programs, 3]: slot, first token, tokens
    width,
    RANKS: tl.constexpr,
    PADDED: tl.constexpr,  # RANKS rounded up to a power of two
    BLOCK: tl.constexpr,  # numbers that are copied at once
):
    """Write the embedding that the adapter of a token has for it, if it has one."""
    slot = tl.load(tiles + 3 * tl.program_id(0)).to(tl.int64)
    if tl.program_id(1) < tl.load(tiles + 3 * tl.program_id(0) + 2):
        at = (tl.load(tiles + 3 * tl.program_id(0) + 1) + tl.program_id(1)).to(tl.int64)
        place = tl.arange(0, PADDED)
        own = tl.load(tokens + slot * RANKS + place, mask=place < RANKS, other=-1)
        found = tl.max(tl.where(own == tl.load(token_ids + at), place, -1), 0)
        if found >= 0:
            source = rows + (slot * RANKS + found) * width
            for k in range(0, width, BLOCK):
                column = k + tl.arange(0, BLOCK)
                inside = column < width
                value = tl.load(source + column, mask=inside)
                tl.store(x + at * width + column, value, mask=inside)


@triton.jit
def add_embeddings(
    x,  # [tokens, width], contiguous: added to, in place
    token_ids,  # int64 [tokens]
    a,  # [slots, vocabulary, RANKS]
    b,  # [slots, width, RANKS]
    gains,  # [slots, width]: GAINS
    ranks,  # int32 [slots]: 0: there is nothing to add
    tiles,  # int32 [programs, 3]: slot, first token, tokens
    vocabulary,
    width,
    GAINS: tl.constexpr,  # whether gains times an embedding are added as well
    RANKS: tl.constexpr,
    PADDED: tl.constexpr,  # RANKS rounded up to a power of two
    ROWS: tl.constexpr,  # of a program; a tile has several programs
    COLUMNS: tl.constexpr,  # of a program
):
    """Add to embeddings what adapters have for their tokens: B times a row of A."""
    count = tl.load(tiles + 3 * tl.program_id(0) + 2) - tl.program_id(1) * ROWS
    slot = tl.load(tiles + 3 * tl.program_id(0)).to(tl.int64)
    own = tl.load(ranks + slot)
    if (count > 0) & (own > 0):
        place = tl.arange(0, ROWS)
        real = place < count
        begin = tl.load(tiles + 3 * tl.program_id(0) + 1) + tl.program_id(1) * ROWS
        row = tl.where(real, begin + place, begin).to(tl.int64)
        token = tl.load(token_ids + row)
        rank = tl.arange(0, PADDED)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < width
        low = tl.load(
            a + (slot * vocabulary + token)[:, None] * RANKS + rank[None, :],
            mask=real[:, None] & (rank < own)[None, :],
            other=0.0,
        )
        w = tl.load(
            b + (slot * width + column)[None, :] * RANKS + rank[:, None],
            mask=(rank < own)[:, None] & inside[None, :],
            other=0.0,
        )
        where = x + row[:, None] * width + column[None, :]
        stored = real[:, None] & inside[None, :]
        y = tl.load(where, mask=stored, other=0.0).to(tl.float32)
        if GAINS:
            gain = tl.load(gains + slot * width + column, mask=inside, other=0.0)
            y += y * gain.to(tl.float32)[None, :]
        y += tl.dot(low, w, input_precision="ieee")
        tl.store(where, y.to(x.dtype.element_ty), mask=stored)


@triton.jit
def find_start(piece: tl.constexpr, second, third, starts):
    """Return where a piece's outputs begin. Three are in registers, which loads would spill."""
    if piece == 0:
        return 0
    elif piece == 1:
        return second
    elif piece == 2:
        return third
    else:
        return tl.load(starts + piece)


@triton.jit
def multiply_low(
    x,  # [tokens, inputs], contiguous
    matrix,  # A [ranks, inputs]
    row,  # int64 [ROWS]: of x
    real,  # [ROWS]: whether it is multiplied
    rank,  # int32 [STEP]
    ranks,
    inputs,
    begin,  # of the inputs that are multiplied
    end,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return the products [ROWS, STEP] of rows and some ranks of A, over a part of the inputs."""
    total = tl.zeros([ROWS, STEP], tl.float32)
    for k in range(begin, end, DEPTH):
        depth = k + tl.arange(0, DEPTH)
        inside = depth < inputs
        a = tl.load(
            matrix + rank[:, None].to(tl.int64) * inputs + depth[None, :],
            mask=(rank < ranks)[:, None] & inside[None, :],
            other=0.0,
        )
        v = tl.load(
            x + row[:, None] * inputs + depth[None, :],
            mask=real[:, None] & inside[None, :],
            other=0.0,
        )
        total = tl.dot(v, tl.trans(a), total, input_precision="ieee")
    return total


@triton.jit
def add_product(
    total,  # float32 [ROWS, OUTPUTS]
    low,  # float32 [parts, rows, PIECES, RANKS]: results of A
    row,  # int64 [ROWS]: of `low`
    block,  # the piece whose A is used
    rows,
    parts,
    matrix,  # B [outputs, ranks]
    output,  # int32 [OUTPUTS]: rows of B
    real,  # [ROWS]: whether the row is multiplied
    own,  # [OUTPUTS]: whether B has the output
    ranks,
    PIECES: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    UNROLLED: tl.constexpr,  # `parts` is a constant
):
    """Return the total and the products of B and the sums of all parts of the results of A."""
    for r in range(0, ranks, DEPTH):
        rank = r + tl.arange(0, DEPTH)
        known = rank < ranks
        v = tl.zeros([ROWS, DEPTH], tl.float32)
        mask = real[:, None] & known[None, :]
        if UNROLLED:
            for part in tl.static_range(parts):
                v += load_low(low, row, block, rows, part, rank, mask, PIECES, RANKS)
        else:
            for part in range(parts):
                v += load_low(low, row, block, rows, part, rank, mask, PIECES, RANKS)
        b = tl.load(
            matrix + output[:, None].to(tl.int64) * ranks + rank[None, :],
            mask=own[:, None] & known[None, :],
            other=0.0,
        )
        total = tl.dot(v.to(b.dtype), tl.trans(b), total, input_precision="ieee")
    return total


@triton.jit
def load_low(low, row, block, rows, part, rank, mask, PIECES: tl.constexpr, RANKS: tl.constexpr):
    """Return some rows' results of A in one part of the inputs; arguments as for `add_product`."""
    at = ((tl.cast(part, tl.int64) * rows + row) * PIECES + block) * RANKS
    return tl.load(low + at[:, None] + rank[None, :], mask=mask, other=0.0)
