"""Products of 8-bit weights with activations rounded to 8 bits (W8A8): `--activations 8`.

Each row of activations has its own scale, found in the step. int8 uses `torch._int_mm` and FP8
`torch._scaled_mm`: libraries' kernels, at twice the rate of bfloat16. Any number of rows is treated
alike, as a row's result must not depend on which other rows are served.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.torch_backend.layers.linears.stored_codes import Codes

_LEAST_ROWS: Final = 32  # `_int_mm` needs more than 16
_EVEN: Final = 16  # outputs must be a multiple of it for `_scaled_mm`
_FP8_FROM: Final = (8, 9)  # first compute capability with FP8 tensor cores
_BLOCK: Final = 1024


def takes_rounded(codes: Codes, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this suits a matrix: 8-bit codes with nothing but a scale per output."""
    form = codes.form
    if form.group or form.lows or codes.order is not None or codes.outputs % _EVEN:
        return False
    if form.kind == "i8":
        return True
    capable = torch.version.hip is None and torch.cuda.get_device_capability(device) >= _FP8_FROM
    return form.kind == "e4m3" and dtype is torch.bfloat16 and capable


def multiply_rounded(
    out: torch.Tensor, x: torch.Tensor, codes: Codes, bias: torch.Tensor | None
) -> None:
    """Write x W^T + b to `out` [rows, outputs], whose rows are contiguous.

    `x`: [rows, inputs], contiguous; `codes`: accepted by `takes_rounded`; `bias`: [outputs].
    """
    from tgi_trio.shard.torch_backend.kernels.linears.rounding import (  # Triton
        round_rows,
        scale_sums,
    )

    rows, inputs = x.shape
    if not rows:
        return
    whole, width = codes.form.kind == "i8", codes.codes.shape[1]
    dtype = torch.int8 if whole else torch.float8_e4m3fn
    padded = max(rows, _LEAST_ROWS) if whole else rows
    rounded = torch.empty((padded, width), dtype=dtype, device=x.device)
    row_scales = torch.empty((padded, 1), dtype=torch.float32, device=x.device)
    round_rows[(rows,)](
        rounded,
        row_scales,
        x,
        inputs,
        width,
        MOST=127.0 if whole else 448.0,
        WHOLE=whole,
        BLOCK=_BLOCK,
    )
    weight = codes.codes.view(dtype).t()
    if not whole:
        scales = codes.scales.float().view(1, -1)
        made = torch._scaled_mm(
            rounded, weight, scale_a=row_scales, scale_b=scales, out_dtype=out.dtype
        )
        out.copy_(made if bias is None else made + bias)
        return
    sums = torch._int_mm(rounded, weight)
    scale_sums[(rows, -(-codes.outputs // _BLOCK))](
        out,
        sums,
        row_scales,
        codes.scales,
        codes.scales if bias is None else bias,
        codes.outputs,
        out.stride(0),
        HAS_BIAS=bias is not None,
        BLOCK=_BLOCK,
    )
