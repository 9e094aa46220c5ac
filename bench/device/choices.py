"""What a warm-up chooses by measuring: told, and left out to see what it is worth."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

if TYPE_CHECKING:
    from tgi_trio.shard.torch_backend.torch_runner import TorchRunner

_BACKEND: Final = "tgi_trio.shard.torch_backend"
# What chooses: without it the library and kernels of their own do the work.
CHOICES: Final = {
    "few rows": f"{_BACKEND}.device_parts.choose_for_few_rows",
    "heads in products": f"{_BACKEND}.device_parts.choose_for_heads",
}
ROWS: Final = (1, 2, 4, 16)  # of decodes beside which those without a choice are seen


def leave_out(choice: str) -> AbstractContextManager[object]:
    """Have a warm-up not make a choice; "": all are made."""
    return mock.patch(CHOICES[choice], lambda *_, **__: None) if choice else nullcontext()


def tell_chosen(runner: TorchRunner) -> dict[str, Any]:
    """Return how many matrices have which rows multiplied by our kernels."""
    found: dict[str, Any] = {}
    model: Any = runner.model  # a decoder
    linears = list(model.linears())
    for rows in ROWS:
        found[f"ours_{rows}"] = sum(rows in each.few_rows for each in linears)
        found[f"fused_{rows}"] = sum(rows in each.fused for each in linears)
        found[f"turned_{rows}"] = sum(rows in each.turned for each in linears)
    return found
