"""LoRA adapters on a device, in slots of memory that does not move, so that recordings can read it.

While steps run, an adapter is read and packed into pinned memory, which is reused later, and copied
to its slot on a stream of its own. Only steps that use the adapter wait, on the device, for the
copy. Each step uploads its rows' adapters as tiles, neighbouring rows with the same adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch

from tgi_trio.errors import ConfigurationError, TgiTrioError
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.model.adapters.sites import EVERYTHING, AdapterScope, Site, adapts_head, head_site
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.split import unit_share
from tgi_trio.shard.adapter_host import LoadedAdapter
from tgi_trio.shard.adapters.reader import AdapterReader
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.machine.accelerator import free_bytes, is_accelerator, record_event
from tgi_trio.shard.sampling.choosing import choice_positions
from tgi_trio.shard.torch_backend.adapters.step_tiles import (
    NO_TILES,
    list_tiles,
    most_tiles,
    pad_tiles,
)
from tgi_trio.shard.torch_backend.adapters.torch_adapters import (
    find_latents,
    find_mixtures,
    wrap_layers,
)
from tgi_trio.shard.torch_backend.batch_invariance import apparent_rows
from tgi_trio.shard.torch_backend.layers.adapters.adapter_layout import (
    ENTRY,
    PackedAdapter,
    SlotLayout,
)
from tgi_trio.shard.torch_backend.layers.adapters.slotted_embeddings import (
    Packed,
    SlottedEmbeddings,
    change_embeddings,
)
from tgi_trio.shard.torch_backend.layers.adapters.slotted_latents import SlottedHeads
from tgi_trio.shard.torch_backend.layers.adapters.slotted_linear import (
    FEW_TOKENS,
    AdapterTile,
    ReservedTiles,
    SlotMemory,
    SlottedLinear,
    choose_adapter_tiles,
)
from tgi_trio.shard.torch_backend.layers.experts.grouped_experts import GroupedExperts
from tgi_trio.shard.torch_backend.layers.experts.slotted_experts import SlottedExperts, first_places
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.mlp import ExpertsMlp
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.recordings.decode_plans import are_decodes
from tgi_trio.shard.torch_backend.staging import (
    Array,
    PinnedLoan,
    PinnedPool,
    Staging,
    packed_size,
    split,
)

_NO_SLOTS: Final = np.zeros(0, np.int64)
_MEMORY_SHARE: Final = 0.8  # most of the memory left by the weights; the rest is for K and V


@dataclass(frozen=True, slots=True)
class _Loaded:
    sha256: bytes
    rank: int
    packed: PackedAdapter  # on the host
    embedded: Sequence[Packed]  # likewise: of each way in which embeddings are changed
    loan: PinnedLoan | None  # owns their pinned memory; None without an accelerator

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + sum(each.nbytes for part in self.embedded for each in part)


class DeviceAdapters:
    """Implements `StepAdapters` for one rank's decoder, whose linears it wraps."""

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rank: int,
        slots: int,
        scope: AdapterScope = EVERYTHING,
        invariant: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Allocate `slots` adapters of up to `max_rank`, for rank `rank` of `world_size`.

        `scope`: what they may change; `invariant`: see `batch_invariance.py`.

        Raises ConfigurationError if they do not fit beside the model.
        """
        share = partial(unit_share, rank=rank, ranks=world_size)
        self._reader = AdapterReader(
            config, decoder.spec, share, max_rank, adds_biases=rank == 0, scope=scope
        )
        self._dtype, self._device = dtype, device
        self._layout = SlotLayout(decoder.spec, share, max_rank, scope)
        shape, ranks = (decoder.spec.vocab_size, decoder.spec.hidden_size), self._layout.ranks
        self.nbytes = slots * self._layout.bytes_per_slot(dtype)
        self.nbytes += SlottedEmbeddings.count_bytes(scope, slots, ranks, shape, dtype)
        if is_accelerator(device):
            _check_room(self.nbytes, device, slots, max_rank)
        self._memory = SlotMemory(
            torch.zeros((slots, self._layout.capacity), dtype=dtype, device=device),
            torch.zeros((slots, self._layout.entries, ENTRY), dtype=torch.int32, device=device),
            self._layout.ranks,
            invariant,
        )
        embeddings = change_embeddings(scope, self._memory, shape)
        self._rows = [] if embeddings is None else embeddings.parts
        decoder.change_embedded = embeddings
        self._kinds = choose_adapter_tiles(dtype)
        self._linears: list[SlottedLinear] = []
        self._heads: list[SlottedHeads] = []  # of latents
        self._mixtures: list[GroupedExperts] = []
        self._wrap_decoder(decoder, scope)
        self._slots: dict[int, int] = {}  # by adapter
        self._free = list(reversed(range(slots)))
        self._unawaited: set[int] = set()  # slots with copies for which no step has waited yet
        self._copy_stream = torch.cuda.Stream(device) if is_accelerator(device) else None
        self._pinned = PinnedPool()
        self._in_flight: list[tuple[torch.Event, _Loaded]] = []  # copied until the events
        self._staging = Staging(device)
        self._tiles: Array | None = None  # int32 [n, 3], of the present step; None: no adapters
        self._chosen = NO_TILES  # of the rows that its head reads
        self._slots_of_tokens = _NO_SLOTS  # int64 [T], of the present step
        self._kind = self._kinds.few

    def _wrap_decoder(self, decoder: Decoder, scope: AdapterScope) -> None:
        """Put adapted parts in the place of the decoder's own."""
        wrap_layers(decoder, self._wrap)
        for site, latent in find_latents(decoder) if scope.latents else ():
            latent.changes = SlottedHeads(latent.spec, self._layout.places[site], self._memory)
            self._heads.append(latent.changes)
        if scope.experts:
            for index, mixture in find_mixtures(decoder):
                self._mixtures.append(self._change(index, mixture))
        if scope.head and adapts_head(decoder.spec):
            place, own = self._layout.places[head_site(decoder.spec)], decoder.head
            head = SlottedLinear(own, place, self._memory, is_head=True)
            self._linears.append(head)
            decoder.choose_head = lambda: head if self._is_head_adapted() else own

    # --- an `AdapterHost` ----------------------------------------------------------------------

    def load(self, order: AdapterOrder) -> LoadedAdapter:
        with self._reader.open(order) as numbers:
            packed = self._layout.pack(numbers, self._dtype)
            embedded = [part.pack(numbers) for part in self._rows]
        loan: PinnedLoan | None = None
        if is_accelerator(self._device):
            loan = self._pinned.lend()
            packed = PackedAdapter(loan.keep(packed.numbers), loan.keep(packed.directory))
            embedded = [list(map(loan.keep, part)) for part in embedded]
        return _Loaded(numbers.sha256, numbers.rank, packed, embedded, loan)

    def install(self, number: int, loaded: LoadedAdapter) -> None:
        """Begin to copy an adapter to a slot; raises TgiTrioError if none is free."""
        if not isinstance(loaded, _Loaded):
            raise TypeError(f"{type(loaded).__name__} was loaded by another host")
        if not self._free:
            raise TgiTrioError(f"all {len(self._slots)} slots of the device have an adapter")
        slot = self._free.pop()
        with self._beside_steps():
            packed, memory = loaded.packed, self._memory
            memory.numbers[slot, : len(packed.numbers)].copy_(packed.numbers, non_blocking=True)
            memory.directory[slot].copy_(packed.directory, non_blocking=True)
            for part, own in zip(self._rows, loaded.embedded, strict=True):
                part.install(slot, own)
            self._keep_until_copied(loaded)
        self._unawaited.add(slot)
        self._slots[number] = slot

    def drop(self, number: int) -> None:
        if (slot := self._slots.pop(number, None)) is not None:
            self._free.append(slot)

    # --- steps ---------------------------------------------------------------------------------

    @property
    def used(self) -> bool:
        """Whether a row of the present step has an adapter."""
        return self._tiles is not None

    def begin(self, plan: StepPlan) -> None:
        """Prepare the adapters of the next step."""
        self._forget()
        if not any(row.sampling.adapter for row in plan.rows):
            return
        slots = np.array([self._slot_of(row.sampling.adapter) for row in plan.rows])
        self._kind = self._kind_for(len(plan.token_ids), decodes=are_decodes(plan))
        self._tiles = list_tiles(slots, plan.query_starts, self._kind.rows)
        self._slots_of_tokens = np.repeat(slots, np.diff(plan.query_starts))
        self._chosen = self._tiles_of(choice_positions(plan, np.flatnonzero(plan.samples)))
        if not self._unawaited.isdisjoint(slots.tolist()):
            self._wait_for_copies()

    @contextmanager
    def idle(self, plan: StepPlan) -> Iterator[None]:
        """Give all rows the adapter in the first slot, to measure memory."""
        self._kind = self._kind_for(len(plan.token_ids), decodes=False)
        slots = np.zeros(len(plan.context_lengths), np.int64)
        self._tiles = list_tiles(slots, plan.query_starts, self._kind.rows)
        try:
            yield
        finally:  # the next step may have fewer rows than these tiles
            self._forget()

    @contextmanager
    def choosing(self, places: Array) -> Iterator[None]:
        """Have the head read other tokens of the step, inside the block; see `StepAdapters`."""
        if self._tiles is None:
            yield
            return
        memory, before = self._memory, self._memory.chosen
        (memory.chosen,) = self._staging.upload([self._tiles_of(places)])
        memory.tile = self._kind
        try:
            yield
        finally:
            memory.chosen = before

    def stage(self) -> None:
        """Upload the step's tiles, for linears that are launched one by one, not recorded."""
        if self._tiles is not None:
            uploaded = self._staging.upload([self._tiles, self._chosen])
            self._memory.tiles, self._memory.chosen = uploaded
            self._memory.tile = self._kind

    def warm_up(self) -> None:
        """Compile everything that steps will launch."""
        self._forget()
        for kind in self._kinds:
            for linear in self._linears:
                linear.compile(kind)
            for heads in self._heads:
                heads.compile(kind)
        for rows in self._rows:
            rows.compile(self._kinds.few)
        for mixture in self._mixtures:
            for kind in self._kinds:
                mixture.compile_changes(kind)

    # --- recordings: see `RecordedAdapters` ----------------------------------------------------

    def reserve(self, tokens: int, rows: int, *, decodes: bool) -> ReservedTiles:
        """Return memory for the tiles of a recording of `tokens` tokens in at most `rows` rows.

        `decodes`: each token is a decode, or a draft after one, and the head reads all of them.
        Otherwise it reads at most `rows`.
        """
        kind = self._kind_for(tokens, decodes=decodes)
        sizes = [tokens] if decodes else [tokens, rows]
        slots = min(rows, len(self._memory.numbers))
        tiles = [np.zeros((most_tiles(n, slots, kind.rows), 3), np.int32) for n in sizes]
        memory = torch.zeros(packed_size(tiles), dtype=torch.uint8, device=self._device)
        views = split(memory, tiles)
        return ReservedTiles(memory, views[0], views[-1], kind)

    def fits(self, reserved: ReservedTiles) -> bool:
        """Return whether a recording has room for the step's tiles, and is for their size."""
        if self._tiles is None or self._kind != reserved.tile:
            return False
        if reserved.chosen is not reserved.tiles and len(self._chosen) > len(reserved.chosen):
            return False
        return len(self._tiles) <= len(reserved.tiles)

    @contextmanager
    def recording(self, reserved: ReservedTiles) -> Iterator[None]:
        """Have linears read the recording's tiles, which every replay refills."""
        memory = self._memory
        memory.tiles, memory.chosen = reserved.tiles, reserved.chosen
        memory.tile = reserved.tile
        try:
            yield
        finally:
            memory.tiles = memory.chosen = None

    def refill(self, reserved: ReservedTiles) -> None:
        """Upload the present step's tiles to a recording's memory."""
        if self._tiles is None:
            raise RuntimeError("no row of the step has an adapter")
        tiles = [pad_tiles(self._tiles, len(reserved.tiles))]
        if reserved.chosen is not reserved.tiles:
            tiles.append(pad_tiles(self._chosen, len(reserved.chosen)))
        self._staging.fill(reserved.memory, tiles)

    # --- parts ---------------------------------------------------------------------------------

    def _wrap(self, site: Site, base: Linear) -> Linear:
        self._linears.append(SlottedLinear(base, self._layout.places[site], self._memory))
        return self._linears[-1]

    def _change(self, index: int, mixture: ExpertsMlp) -> GroupedExperts:
        """Have the experts of a layer changed; raises ConfigurationError if they are apart."""
        grouped, places = mixture.grouped, self._layout.places
        if grouped is None:
            raise ConfigurationError(
                f"the experts of layer {index} are computed one by one on {self._device}, which "
                "adapters cannot change: leave out of --lora-adapters those of experts"
            )
        every = range(mixture.spec.count)
        grouped.changes = SlottedExperts(
            self._memory,
            first_places([places[Site(index, "expert inner", i)] for i in every]),
            first_places([places[Site(index, "expert down", i)] for i in every]),
        )
        return grouped

    def _is_head_adapted(self) -> bool:
        """Whether any row that the head reads now has an adapter."""
        return self._memory.chosen is not None and len(self._memory.chosen) > 0

    def _forget(self) -> None:
        """Have no step: no rows have adapters."""
        self._memory.tiles = self._memory.chosen = self._tiles = None
        self._chosen, self._slots_of_tokens = NO_TILES, _NO_SLOTS

    def _tiles_of(self, places: Array) -> Array:
        """Return the tiles of rows that are these tokens of the step."""
        slots = self._slots_of_tokens[places]
        return list_tiles(slots, np.arange(len(slots) + 1), self._kind.rows)

    def _slot_of(self, number: int) -> int:
        return self._slots[number] if number else -1

    def _kind_for(self, tokens: int, *, decodes: bool) -> AdapterTile:
        """Return the size of tiles for a step of so many tokens."""
        tokens = apparent_rows(tokens, invariant=self._memory.invariant)
        few = decodes or tokens <= FEW_TOKENS
        return self._kinds.few if few else self._kinds.many

    @contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """Launch on a stream of its own: after the steps so far, and beside later ones."""
        if self._copy_stream is None:
            yield
            return
        self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copy_stream):
            yield

    def _keep_until_copied(self, loaded: _Loaded) -> None:
        """Keep what the device is copying now, and release what it has copied."""
        if loaded.loan is None:
            return
        waiting = [each for each in self._in_flight if not each[0].query()]
        self._in_flight = [*waiting, (record_event(self._device), loaded)]

    def _wait_for_copies(self) -> None:
        """Have the device wait for all copies before it computes anything further."""
        if self._copy_stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._copy_stream)
        self._unawaited.clear()


def _check_room(needed: int, device: torch.device, slots: int, max_rank: int) -> None:
    free = free_bytes(device)
    if needed > _MEMORY_SHARE * free:
        raise ConfigurationError(
            f"room for {slots} LoRA adapters of rank {max_rank} takes {needed >> 20} MiB of the "
            f"{free >> 20} MiB that {device} has left; lower --max-loaded-adapters or "
            "--max-lora-rank"
        )
