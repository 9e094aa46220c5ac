"""Checks the router's PREFILL rows and blocks; refuses bad ones with an error that says why."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

from tgi_trio.ipc.messages import PrefillRow


@dataclass(frozen=True, slots=True)
class RowChecks:
    """What there is to grant; fields as `Batch` has them."""

    vocab_size: int
    block_size: int
    blocks: int
    state_slots: int

    def check_row(self, row: PrefillRow, held: Collection[int]) -> None:
        """Raise ValueError for a row that cannot be run; `held`: the sequences that are."""
        self.check_blocks(row.block_ids)
        count = len(row.token_ids)
        if row.sequence in held:
            raise ValueError(f"sequence {row.sequence} is held already")
        if not 0 <= row.cached_length < count:
            raise ValueError(
                f"{row.cached_length} of {count} tokens cached; at least the last must be computed"
            )
        if not 0 <= row.prompt_length <= count:
            raise ValueError(f"a prompt of {row.prompt_length} tokens, but {count} were given")
        if row.max_new_tokens < 1:
            raise ValueError("max_new_tokens is 0; at least 1 token must be asked for")
        if row.token_ids.min() < 0 or row.token_ids.max() >= self.vocab_size:
            raise ValueError(
                f"token ids from {row.token_ids.min()} to {row.token_ids.max()}; the model has "
                f"0 to {self.vocab_size - 1}"
            )
        if len(row.block_ids) * self.block_size < row.cached_length:
            raise ValueError(
                f"{row.cached_length} cached tokens do not fit {len(row.block_ids)} blocks"
            )
        self._check_states(row)

    def check_blocks(self, block_ids: Iterable[int]) -> None:
        """Raise ValueError for blocks that are none of the cache's to grant."""
        if not self.blocks:
            raise ValueError("there is no KV cache before WARMUP")
        wrong = [block for block in block_ids if not 0 < block < self.blocks]
        if wrong:
            raise ValueError(f"KV blocks {wrong[:4]}; granted may be 1 to {self.blocks - 1}")

    def _check_states(self, row: PrefillRow) -> None:
        states = row.states
        if (states is not None) != (self.state_slots > 0):
            raise ValueError("slots for states, and a model without" if states else "no slots")
        if states is None:
            return
        slots = [*states.slots, *(slot for _, slot in states.saves)]
        slots += [states.source] if states.source else []
        if len(set(slots)) < len(slots) or not all(0 < s < self.state_slots for s in slots):
            raise ValueError(
                f"slots {slots} for states; granted may be 1 to {self.state_slots - 1}, each once"
            )
        if bool(states.source) != (row.cached_length > 0):
            raise ValueError(f"{row.cached_length} tokens cached, states from {states.source}")
        stops = [row.cached_length, *(at for at, _ in states.saves), len(row.token_ids)]
        if any(at >= after for at, after in pairwise(stops)):
            raise ValueError(f"states saved behind {stops[1:-1]} of tokens {stops[0]}-{stops[-1]}")
