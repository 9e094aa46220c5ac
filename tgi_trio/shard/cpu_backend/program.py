"""The table of operations that the kernels run for one model, and what it points to."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.adapters.sites import EVERYTHING, NOTHING, AdapterScope
from tgi_trio.model.matrices.decoder import outer_refs
from tgi_trio.model.matrices.layer_work import find_run
from tgi_trio.model.specs.decoder import DecoderSpec, RotarySpec
from tgi_trio.model.speculators.spec import HeadsSpec
from tgi_trio.model.split import Portion
from tgi_trio.model.stages import Run
from tgi_trio.shard.checkpoint.lookup import Weights
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.key_caches import KeyCaches
from tgi_trio.shard.cpu_backend.kinds.kind import (
    BLOCK_INPUTS,
    FACTS_BYTES,
    Kind,
    active_block_bytes,
)
from tgi_trio.shard.cpu_backend.operations.adapted import AdaptedOperations
from tgi_trio.shard.cpu_backend.operations.buffer_widths import find_widths
from tgi_trio.shard.cpu_backend.operations.choosers import (
    find_index_buffers,
    find_index_room,
    find_turning,
)
from tgi_trio.shard.cpu_backend.operations.lone_linears import LONE_ROWS, LoneLinear
from tgi_trio.shard.cpu_backend.operations.mixtures import find_mixture_buffers, pad_to_panel
from tgi_trio.shard.cpu_backend.operations.padded_heads import kept_sizes
from tgi_trio.shard.cpu_backend.operations.per_layer_inputs import own_width
from tgi_trio.shard.cpu_backend.packing import Packer
from tgi_trio.shard.cpu_backend.program_builder import FinalNorm, ProgramBuilder
from tgi_trio.shard.cpu_backend.rotary_tables import RotaryTables
from tgi_trio.shard.cpu_backend.tables import OF_PADDING, TO_BLOCKS, TURNING, Buffer, Code
from tgi_trio.shard.cpu_backend.weight_layout import PANEL, SPARE_ROWS, CacheNumbers, Storage
from tgi_trio.shard.positions.rotary_frequencies import short_length

if TYPE_CHECKING:
    from tgi_trio.shard.cpu_backend.adapter_kernels import AdapterKernels
    from tgi_trio.shard.cpu_backend.panel_kernel import PanelKernel

Array = NDArray[Any]


@contextlib.contextmanager
def pack_program(
    spec: DecoderSpec,
    weights: Weights,
    dtype: str,
    *,
    int8: bool = False,
    int8_by_rows: bool = False,
    threads: int = 1,
    heads: tuple[HeadsSpec, Weights] | None = None,
    max_lora_rank: int = 0,
    scope: AdapterScope = EVERYTHING,
    kv: CacheNumbers | None = None,
    run: Run | None = None,
    portion: Portion = Portion(),  # noqa: B008 (frozen)
) -> Iterator[Program]:
    """Yield a model's program while `threads` pack its weights; leaving the block waits for them.

    `int8`: linear layers get 8-bit weights. `int8_by_rows`: stored ones are multiplied as
    for `find_packing`. `heads`: speculation heads and their weights.
    `max_lora_rank`, `scope`, `kv`, `run`, `portion`: as for `Program`. Raises ModelLoadError as the
    weights and the packer do.
    """
    with Packer(Storage("int8" if int8 else dtype), threads) as packer:
        program = Program(
            spec,
            weights,
            packer,
            bf16=dtype == "bfloat16",
            as_stored=not int8,
            int8_by_rows=int8_by_rows,
            heads=heads,
            max_lora_rank=max_lora_rank,
            scope=scope,
            kv=kv,
            run=run,
            portion=portion,
        )
        packer.start()
        yield program


class Program:
    """The operations of one model, with its packed weights and its KV cache.

    `operations[:body]` compute hidden states, those up to `end` the logits of the wanted tokens.
    After them come the linear layers of speculation heads (`lone`). A stage of a pipeline that is
    not the last has only the body.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        packer: Packer,
        *,
        bf16: bool,
        as_stored: bool = True,
        int8_by_rows: bool = False,
        heads: tuple[HeadsSpec, Weights] | None = None,
        max_lora_rank: int = 0,
        scope: AdapterScope = EVERYTHING,
        kv: CacheNumbers | None = None,
        run: Run | None = None,
        portion: Portion = Portion(),  # noqa: B008 (frozen)
    ) -> None:
        """Hand every weight to `packer`; raises ModelLoadError as the weights do.

        `bf16`: the model's dtype is bfloat16, otherwise float32. `as_stored`: quantised weights are
        multiplied as stored if there is a kernel for their kind; `int8_by_rows`: as for
        `find_packing`. `max_lora_rank`: of adapters; 0: none will be loaded. `scope`: what they may
        change. `kv`: how K and V are stored; None: in the model's dtype. `run`: the layers that are
        computed here; None: all. `portion`: of every layer.
        """
        self.model = portion.sizes_of(spec)  # all layers
        self.run = run = run or find_run(spec, None)
        own = tuple(self.model.layers[index] for index in run.layers)
        self.spec = replace(self.model, layers=own)  # only the layers computed here
        self._built = built = ProgramBuilder(
            spec,
            weights,
            packer,
            bf16=bf16,
            as_stored=as_stored,
            int8_by_rows=int8_by_rows,
            turns=not max_lora_rank,  # what adapters add is added to results that are not turned
            heads=heads,
            kv=kv,
            scope=scope if max_lora_rank else NOTHING,
            run=run,
            portion=portion,
        )
        number = np.dtype(np.uint8 if kv else np.uint16 if bf16 else np.float32)
        self.caches = KeyCaches(self.spec, number)
        self.lone: Mapping[str, LoneLinear] = built.lone
        self.embedding = built.embedding
        self.final_norm: FinalNorm | None = built.final_norm
        self.weight_bytes = built.writer.weight_bytes
        self.end = built.end
        self.body = built.body
        self.sums = built.writer.sums  # see `OperationWriter`
        share = portion.share(outer_refs(spec).head.pieces[0].outputs)
        self.vocabulary = share.stop - share.start if run.is_last else 0  # logits computed here
        self.adapted: AdaptedOperations | None = None
        self.operations = np.stack(built.writer.rows)
        if max_lora_rank:
            adapted = AdaptedOperations(self.operations, self.end, built.sites.sites, max_lora_rank)
            self.adapted, self.operations = adapted, adapted.table
        # kept alive here, since operations hold only addresses
        self.rotary = RotaryTables((), 0, 0, whole=True)
        self.room_bytes = 0  # scratch memory of a thread for products with quantised weights

    @property
    def kv_cache(self) -> list[tuple[Array, Array]]:
        """K and V of each layer that has its own."""
        return self.caches.kept

    @property
    def kv_layers(self) -> int:
        """Layers that have their own K and V."""
        return len(self.caches.sizes)

    def find_index_room(self, longest: int) -> int:
        """Return the bytes of scratch memory that a thread needs for indexes."""
        return find_index_room(self.spec, self.widest_head, longest)

    @property
    def widest_head(self) -> int:
        """The size of the largest query, key or value."""
        return max((max(own.dim, own.value_dim) for own in self.caches.sizes), default=0)

    @property
    def widest_queries(self) -> int:
        """The features of all heads' queries, or of what they say, in the layer with most."""
        own = (kept_sizes(self.spec, layer) for layer in self.spec.layers if layer.attends)
        return max((each.heads * max(each.dim, each.value_dim) for each in own), default=0)

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot of recurrent states over all layers; 0: no states."""
        return int(self.operations[: self.end]["state_bytes"].sum())

    @cached_property  # each step needs it
    def by_length(self) -> bool:
        """Whether rotary frequencies depend on a sequence's length."""
        turning = (layer.rotary for layer in self.model.layers if layer.rotary is not None)
        return any(short_length(own) is not None for own in turning)

    def find_layer(self, index: int, *, adapted: bool) -> int:
        """Return the first operation of a layer, in the copy for adapters or in the model's own.

        The number of layers means the operations after the last layer.
        """
        row = self._firsts[index]
        return self.adapted.find(row) if adapted and self.adapted is not None else row

    @property
    def _firsts(self) -> list[int]:
        """The first operation of each layer, and of what follows the last one."""
        return [*self._built.layer_rows, self.body]

    @property
    def kinds(self) -> Collection[Kind]:
        """The kinds of all weights that are multiplied as integers, or as stored."""
        return self._built.writer.quantised.kinds()

    @property
    def has_stored_kinds(self) -> bool:
        """Whether any of the model's own weights have such a kind; heads are rounded separately."""
        return bool(self._built.writer.quantised.kinds(self.end))

    @property
    def is_all_as_stored(self) -> bool:
        """Whether all matrices but routers, which may be plain numbers, are as stored."""
        own = self.operations[: self.end]
        linear = np.isin(own["code"], (Code.LINEAR, Code.EXPERTS))
        linear &= ~np.isin(own["target"], (Buffer.ROUTED, Buffer.OPENED))
        return bool((own["active_bytes"][linear] > 0).all())

    def link(self, kernels: Mapping[str, PanelKernel]) -> None:
        """Link the kernels that multiply quantised weights, by the names of their kinds."""
        self.room_bytes = self._built.writer.quantised.link(
            self.operations[: len(self._built.writer.rows)], kernels
        )
        self._mirror()

    def has(self, codes: Collection[Code]) -> bool:
        """Whether the model has any of these operations."""
        return bool(np.isin(self.operations["code"], list(codes)).any())

    def link_kernel_group(self, codes: Collection[Code], kernel: int) -> None:
        """Link the entry at this address to these operations."""
        self.operations["kernel"][np.isin(self.operations["code"], list(codes))] = kernel
        self._mirror()

    def link_adapters(self, kernels: AdapterKernels) -> None:
        """Link the kernels of adapters."""
        if self.adapted is not None:
            self.adapted.kernels = kernels
            self._mirror()

    def _mirror(self) -> None:
        # attention to blocks, and the one before it, write rows of one buffer in the same forms
        twins = np.flatnonzero(np.isin(self.operations["code"], TO_BLOCKS))
        self.operations["forms"][twins - 1] = self.operations["forms"][twins]
        if self.adapted is not None:
            self.adapted.mirror()

    def allocate_kv(self, blocks: int) -> int:
        """Allocate a new, empty KV cache; return its bytes."""
        kept = self.caches.allocate(self.operations, self._firsts, blocks)
        self._mirror()
        return kept

    def allocate_states(self, slots: int) -> int:
        """Allocate new slots for states, including slot 0; return their bytes."""
        self._states: list[Array] = []  # freed before the new ones are allocated: both may not fit
        for operation in self.operations[: self.end]:
            if operation["state_bytes"]:
                made = allocate_zeroed((slots, int(operation["state_bytes"])))
                operation["states"] = address(made)
                self._states.append(made)
        self._mirror()
        return sum(made.nbytes for made in self._states)

    @property
    def states(self) -> Sequence[Array]:
        """The states of each layer that keeps any, uint8 [slots, bytes]."""
        return self._states

    def set_positions(self, count: int, tokens: int) -> None:
        """Make the rotary tables for positions below `count` and steps of up to `tokens`."""
        places = list(self._find_turning())
        keys, whole = [key for _, key in places], self.spec.latent is None
        factors = self._built.rotary_factors
        self.rotary = RotaryTables(keys, count, tokens, whole=whole, factors=factors)
        for place, key in places:
            for name, value in self.rotary.fields(*key).items():
                self.operations[place][name] = value
        self._mirror()

    def _find_turning(self) -> Iterator[tuple[int, tuple[RotarySpec, int]]]:
        """Yield each operation that turns, with how and the size of a head."""
        for layer, first, end in zip(
            self.spec.layers, self._firsts[:-1], self._firsts[1:], strict=True
        ):
            for place, code in enumerate(self.operations["code"][first:end], first):
                if code in (Code.ROTATE, Code.TURN) and layer.rotary is not None:
                    yield place, (layer.rotary, kept_sizes(self.spec, layer).dim)
                if (turning := find_turning(self.spec, layer, code)) is not None:
                    yield place, turning

    def buffer_bytes(self, tokens: int, wanted: int, longest: int) -> dict[Buffer, int]:
        """Return every buffer's bytes, for a number of tokens, of rows of logits, of a context."""
        spec, queries = self.spec, self.widest_queries
        apart = spec.gated_attention or spec.gated_heads or self.has(OF_PADDING)
        own = find_widths(self.model, self.run, queries=queries, apart=apart)
        widest = max(own.normed, queries, own.mlp, own.mixed, self._built.writer.widest)
        unsorted = max(own.normed, own.mixed)
        reads_input = spec.index is not None and spec.index.reads_input
        keeps_wide = bool(self.kinds or spec.norm_gate_rank or reads_input)
        blocks = (max(tokens, wanted) + SPARE_ROWS) * widest
        whole = blocks // BLOCK_INPUTS if self.kinds else 0
        lone = self.lone.values()
        mixtures = [layer.experts for layer in spec.layers if layer.experts]
        per_token = max((each.per_token for each in mixtures), default=0)
        members = tokens * per_token
        changed = members if self.adapted and self.adapted.sorts else 0  # rows that adapters change
        experts = pad_to_panel(max((each.count for each in mixtures), default=0))
        several = spec.streams or spec.hyper or spec.gated_streams
        streams = several.count if several else 0
        opens = bool(spec.names.shared_router) and any(each.shared_width for each in mixtures)
        return {
            Buffer.HIDDEN: tokens * spec.hidden_size * 4,
            Buffer.NORMED: (max(tokens, wanted) + SPARE_ROWS) * own.normed * 4,
            Buffer.QKV: tokens * max(self._built.qkv_width, own.gates) * 4,
            Buffer.QUERY: tokens * queries * 4,
            Buffer.ATTENDED: (tokens + SPARE_ROWS) * queries * 4,
            Buffer.INNER: (tokens + SPARE_ROWS) * own.inner * 4,
            Buffer.BRANCH: tokens * spec.hidden_size * 4,
            Buffer.LOGITS: wanted * self.padded_vocab * 4,
            Buffer.WHOLE_8: whole * active_block_bytes(8),
            Buffer.WHOLE_16: whole * active_block_bytes(16),
            Buffer.DIGITS: (max(tokens, wanted) + SPARE_ROWS)
            * self._digits_bytes(widest, max(1, per_token)),
            Buffer.LONE: LONE_ROWS * 4 * max((each.inputs for each in lone), default=0),
            Buffer.PRODUCT: LONE_ROWS * 4 * max((each.width for each in lone), default=0),
            Buffer.LOW: max(tokens, changed) * self.low_width * 4,
            Buffer.ACTIVE: blocks * 4 if self.kinds and self.low_width else 0,
            Buffer.FLOATS: blocks * 4 if any(kind.floating for kind in self.kinds) else 0,
            Buffer.RAW: self._built.writer.count_raw(tokens, wanted, LONE_ROWS) * 4,
            Buffer.GATES: tokens * own.inner * 4 if self.has(TURNING) else 0,
            Buffer.UNSORTED: max(tokens, wanted) * unsorted * 4 if keeps_wide else 0,
            Buffer.ROUTED: tokens * max(experts, pad_to_panel(streams)) * 4,
            Buffer.SHARES: tokens * PANEL * 4 if spec.hyper or spec.gated_streams else 0,
            Buffer.FOUND: tokens * 8 * own.found,
            Buffer.OPENED: tokens * PANEL * 4 if opens else 0,
            Buffer.SHARED: tokens * spec.hidden_size * 4 if opens else 0,
            Buffer.PROJECTED: tokens * own.projected * 4,
            Buffer.DECAYS: tokens * own.decays * 4,
            Buffer.MIXED: (tokens + SPARE_ROWS) * own.mixed * 4,
            Buffer.OWN: tokens * own_width(spec) * 4,
            Buffer.STREAMS: tokens * streams * spec.hidden_size * 4,
            Buffer.BOTH: tokens * 2 * spec.hidden_size * 4 if self.has((Code.COPY,)) else 0,
            Buffer.DENSE: tokens * spec.hidden_size * 4 * any(each.beside for each in spec.layers),
            **find_index_buffers(spec, tokens, longest),
            **find_mixture_buffers(members, changed, experts, spec.hidden_size),
        }

    def _digits_bytes(self, widest: int, rows: int) -> int:
        """Return the bytes of DIGITS for a token, of up to so many numbers in so many rows."""
        by_rows = any(kind.by_rows for kind in self.kinds)
        return 2 * widest + rows * FACTS_BYTES if by_rows else 0

    @property
    def low_width(self) -> int:
        """Activations in a row of LOW; 0 without adapters."""
        return 0 if self.adapted is None else self.adapted.low_width

    @property
    def padded_vocab(self) -> int:
        """Width of a row of logits: the vocabulary in whole panels; 0 before the last stage."""
        return -(-self.vocabulary // PANEL) * PANEL

    def describe(self) -> str:
        """Describe for an operator how quantised weights are used; "": there are none."""
        return self._built.writer.describe(self.end)
