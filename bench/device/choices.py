"""What a warm-up chooses by measuring, and what else few rows gain by: told, and left out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

if TYPE_CHECKING:
    import torch

    from tgi_trio.shard.torch_backend.torch_runner import TorchRunner

_BACKEND: Final = "tgi_trio.shard.torch_backend"


def _choose_nothing(*_: object, **__: object) -> None:
    """Leave to the library, and to kernels of their own, what might be chosen."""


def _begin_late(device: torch.device) -> dict[str, bool]:
    """Launch kernels as others are."""
    return {"OVERLAPS": False}


# What is to be seen without: a name of the backend's, and what takes its place then.
CHOICES: Final[dict[str, tuple[str, object]]] = {
    "few rows": ("device_parts.choose_for_few_rows", _choose_nothing),
    "heads in products": ("device_parts.choose_for_heads", _choose_nothing),
    "looking up at once": ("models.beginning._WORTH", 0.0),
    "measured shares": ("device_parts.choose_shares", _choose_nothing),
    "measured carve-outs": ("recordings.carveouts._WORTH", 0.0),
    "the last norm in a product": ("layers.linears.few_rows._WORTH_OF_NORM", 0.0),  # never worth it
    "early choices": ("sampling.choice_kernels.overlap", _begin_late),
}
ROWS: Final = (1, 2, 4, 16, 64)  # of decodes beside which those without a choice are seen


def leave_out(choice: str) -> AbstractContextManager[object]:
    """Have a warm-up not make a choice; "": all are made."""
    if not choice:
        return nullcontext()
    name, instead = CHOICES[choice]
    return mock.patch(f"{_BACKEND}.{name}", instead)


def tell_chosen(runner: TorchRunner) -> dict[str, Any]:
    """Return how many matrices have which rows multiplied by our kernels."""
    found: dict[str, Any] = {}
    model: Any = runner.model  # a decoder
    linears = list(model.linears())
    for rows in ROWS:
        found[f"ours_{rows}"] = sum(rows in each.few_rows for each in linears)
        found[f"fused_{rows}"] = sum(rows in each.fused for each in linears)
        found[f"turned_{rows}"] = sum(rows in each.turned for each in linears)
    found["looked_up_at_once"] = sorted(model.beginning.rows)
    found["other_shares_1"] = sorted({(*own.weight.shape,) for own in linears if own.other_share})
    graphs = runner._graphs
    if graphs is not None and graphs.carveouts is not None:
        found["carveouts"] = dict(graphs.carveouts.chosen)
    return found
