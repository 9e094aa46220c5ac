"""Slots and blocks that lie far away: offsets that need 64 bits, in tests of small memory.

One run of a launch has all its slots (or blocks of a table) so many numbers further that offsets
grow beyond 2^32 numbers, and memory that begins as many before its place. Where a kernel computes
in 64 bits the two cancel out; where it does not, it leaves its memory.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

_NUMBERS: Final = 1 << 33
_MOST: Final = 1 << 30  # slots or blocks, which 32 bits hold


class Slots(NamedTuple):
    """Arguments of a kernel: what has slots, and what says which slots are used."""

    memory: tuple[str, ...]  # [slots, ...] each
    indices: tuple[str, ...] = ()  # slots
    tables: str = ""  # of blocks, of PAGE slots each


_HEADS_WRITTEN: Final = Slots(("key", "value"), ("slots",))
_KEYS_WRITTEN: Final = Slots(("key",), ("slots",))
_KEYS_READ: Final = Slots(("keys",), (), "tables")
_BOTH_READ: Final = Slots(("key", "value"), (), "tables")
_STATES: Final = Slots(("states",), ("reads", "writes"))
_TAILS: Final = Slots(("tails",), ("reads", "writes"))
_TEXTS: Final = Slots(("texts",), ("slots",))
_COUNTS: Final = Slots(("counts",), ("slots",))

FAR: Final[dict[str, Slots]] = {
    **dict.fromkeys(("rotate_and_write", "rotate_and_expand"), _HEADS_WRITTEN),
    "rotate_and_convolve": Slots(("key", "value", "tails"), ("slots", "reads", "writes")),
    "multiply_heads": _HEADS_WRITTEN,
    "write_shared_keys": Slots(("keys",), ("slots",), "tables"),
    **dict.fromkeys(
        ("write_latents", "write_index_keys"),
        _KEYS_WRITTEN,
    ),
    "write_indexed_latents": Slots(("key",), ("slots",), "tables"),
    "write_heads_and_index": Slots(("key", "value", "index_key", "turns"), ("slots",), "tables"),
    **dict.fromkeys(
        ("score_units", "score_and_absorb", "score_blocks", "attend_entries", "attend_entry_spans"),
        _KEYS_READ,
    ),
    **dict.fromkeys(("attend_tile", "attend_spans"), _BOTH_READ),
    **dict.fromkeys(("attend_latents", "attend_latent_spans"), Slots(("key",), (), "tables")),
    **dict.fromkeys(
        ("step_delta_rule", "run_chunks", "step_mamba2", "scan_mamba2", "scan_mamba1"), _STATES
    ),
    **dict.fromkeys(("step_gated", "scan_gated"), _STATES),
    **dict.fromkeys(("convolve", "find_ngrams", "spread_ngrams"), _TAILS),
    **dict.fromkeys(("write_texts", "keep_tokens", "look_up"), _TEXTS),
    **dict.fromkeys(("count_tokens", "survey_scores"), _COUNTS),
}


class Moved(NamedTuple):
    """What a launch is given instead, by argument."""

    shifts: dict[str, int]  # bytes that memory is said to begin before its place
    indices: dict[str, torch.Tensor]


def move_far(kernel: str, told: dict[str, Any]) -> Moved | None:
    """Return how slots can be moved away, None if the kernel has none, or is given none."""
    slots = FAR.get(kernel)
    if slots is None:
        return None
    names = slots.memory + slots.indices + ((slots.tables,) if slots.tables else ())
    given = [told[name] for name in names]
    if any(not isinstance(each, torch.Tensor) or not each.numel() for each in given):
        return None
    memory = {name: told[name] for name in slots.memory}
    if any(each.dim() < 2 for each in memory.values()):
        return None
    page = int(told["PAGE"]) if slots.tables else 1
    steps = [each.stride(0) for each in memory.values()]
    blocks = min(_MOST, -(-_NUMBERS // (min(steps) * page)))
    indices = {name: _add(told[name], blocks * page) for name in slots.indices}
    if slots.tables:
        indices[slots.tables] = _add(told[slots.tables], blocks)
    shifts = {
        name: blocks * page * each.stride(0) * each.element_size() for name, each in memory.items()
    }
    return Moved(shifts, indices)


def _add(numbers: torch.Tensor, amount: int) -> torch.Tensor:
    """Return a copy of slots that are all so many further, except those that are none."""
    moved = torch.empty_strided(numbers.size(), numbers.stride(), dtype=numbers.dtype)
    return moved.copy_(torch.where(numbers >= 0, numbers + amount, numbers))
