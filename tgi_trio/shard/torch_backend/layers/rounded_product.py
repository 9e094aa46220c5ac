"""Products of 8-bit weights with activations that are rounded to 8 bits, too: `--activations 8`.

Each row of activations has a scale of its own, found in the step. int8 is multiplied by
`torch._int_mm`, FP8 by `torch._scaled_mm`: libraries' kernels, at twice the rate of bfloat16's. The
same is done for any number of rows: what a row says must not depend on who else is served.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.torch_backend.layers.stored_codes import Codes

_LEAST_ROWS: Final = 32  # which `_int_mm` wants more than 16 of
_EVEN: Final = 16  # what `_scaled_mm` wants outputs to be a multiple of
_FP8_FROM: Final = (8, 9)  # compute capability whose units multiply FP8
_BLOCK: Final = 1024


def takes_rounded(codes: Codes, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a matrix can be multiplied so: 8 bits, and nothing but a scale per output."""
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
    """Put x W^T + b into `out` [rows, outputs], dense but for its first stride.

    `x` [rows, inputs], contiguous; `codes`: as `takes_rounded` takes them; `bias` [outputs].
    """
    from tgi_trio.shard.torch_backend.kernels.rounding import round_rows, scale_sums  # Triton

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
