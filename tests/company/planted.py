"""Faults of the kind that companies are there to find, planted one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.company import planted_calls
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.messages import PrefillRow, StateGrant, StepReport
from tgi_trio.router.scheduling import kv_memory, report_columns, step_reports
from tgi_trio.router.scheduling.image_pins import ImagePins
from tgi_trio.router.scheduling.image_prefixes import ImagePrefixes
from tgi_trio.router.scheduling.kept_prefixes import Budget, Collected
from tgi_trio.router.scheduling.kv_memory import KvMemory
from tgi_trio.router.scheduling.scheduler import Scheduler
from tgi_trio.router.scheduling.sequence import Sequence
from tgi_trio.router.scheduling.state_memory import StateHold
from tgi_trio.shard.contract import Choices, ShardSequence, StepPlan
from tgi_trio.shard.cpu_backend import cpu_sampler
from tgi_trio.shard.loop import batch, micro_batches, row_table
from tgi_trio.shard.media.features import FeatureStore, ImageFeatures
from tgi_trio.shard.media.held_image import HeldImage
from tgi_trio.shard.media.placed_features import PlacedFeatures
from tgi_trio.shard.ranks import follower, plan_frames
from tgi_trio.shard.sampling import base, choosing
from tgi_trio.shard.sampling.base import SamplerBase, SamplingSettings
from tgi_trio.shard.sampling.guides import Grammars
from tgi_trio.shard.sampling.logits_processors import Counts, TokenCounts

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def _blocks_stay(patch: Patch) -> None:
    """When a row leaves, those behind it keep its place's block table."""
    columns = tuple(name for name in row_table._COLUMNS if name != "blocks")
    patch.setattr(row_table, "_COLUMNS", columns)


def _prefix_too_long(patch: Patch) -> None:
    """A sequence begins a token behind the cached prefix."""
    own = KvMemory.admit

    def admit(memory: KvMemory, sequence: Sequence, match: Any, tokens: int) -> None:
        own(memory, sequence, match, tokens)
        if sequence.computed and sequence.computed < sequence.length - 1:
            sequence.computed += 1

    patch.setattr(kv_memory.KvMemory, "admit", admit)


def _seed_by_step(patch: Patch) -> None:
    """What is drawn depends on how many steps there have been."""
    own, steps = base.uniforms, [0]

    def uniforms(settings: SamplingSettings, *draw: Any) -> NDArray[np.float64]:
        steps[0] += 1
        return (own(settings, *draw) + 0.137 * steps[0]) % 1

    patch.setattr(cpu_sampler, "uniforms", uniforms)


def _neighbours_grammar(patch: Patch) -> None:
    """Of several rows with a grammar each gets the mask of the next one."""
    own = Grammars.allowed

    def allowed(
        grammars: Grammars, sequences: list[ShardSequence]
    ) -> tuple[NDArray[np.uint8], dict[int, str]]:
        masks, faults = own(grammars, sequences)
        return np.roll(masks, 1, axis=0), faults

    patch.setattr(Grammars, "allowed", allowed)


def _adapter_above(patch: Patch) -> None:
    """A sequence that joins others has the adapter of the one before it."""
    own = row_table.RowTable.add

    def add(table: row_table.RowTable, sequence: ShardSequence) -> int:
        if table.sequences:
            above = table.sequences[-1].sampling.adapter
            sequence.sampling = replace(sequence.sampling, adapter=above)
        return own(table, sequence)

    patch.setattr(row_table.RowTable, "add", add)


def _prompt_forgotten(patch: Patch) -> None:
    """A sequence that comes back is penalised for its own words as if its client had said them."""
    own = Sequence.prefill_row

    def prefill_row(sequence: Sequence) -> PrefillRow:
        row = own(sequence)
        return replace(row, prompt_length=len(row.token_ids))

    patch.setattr(Sequence, "prefill_row", prefill_row)


def _counts_kept(patch: Patch) -> None:
    """Tokens stay counted that were drafts, or whose step was computed again."""
    own = TokenCounts.update

    def update(counts: TokenCounts, sequence: ShardSequence) -> Counts:
        seen, counts._seen = counts._seen, min(counts._seen, sequence.length)
        found = own(counts, sequence)
        counts._seen = min(seen, sequence.length - 1) if seen > counts._seen else counts._seen
        return found

    patch.setattr(TokenCounts, "update", update)


def _states_late(patch: Patch) -> None:
    """A snapshot of states is taken a token late."""
    own = StateHold.grant

    def grant(hold: StateHold, held_length: int) -> StateGrant:
        found = own(hold, held_length)
        return replace(found, saves=tuple((at + 1, slot) for at, slot in found.saves))

    patch.setattr(StateHold, "grant", grant)


def _tops_of_some(patch: Patch) -> None:
    """Top tokens of a prompt are left out of steps in which nobody has any."""
    own = report_columns.prompt_tops_per_row

    def prompt_tops_per_row(step: StepReport) -> list[list[report_columns.Tops]]:
        return own(step) if step.prompt_top_ids else [[] for _ in step.sequence]

    patch.setattr(step_reports, "prompt_tops_per_row", prompt_tops_per_row)


def _stale_settings(patch: Patch) -> None:
    """Settings of rows are kept for as many other rows."""
    own = SamplerBase._settings

    def settings(
        sampler: SamplerBase, rows: list[ShardSequence], size: int
    ) -> list[SamplingSettings]:
        if len(rows) > 1 and len(sampler._rows) == len(rows):
            return sampler._blocks
        return own(sampler, rows, size)

    patch.setattr(SamplerBase, "_settings", settings)


def _draft_too_many(patch: Patch) -> None:
    """A first draft that is wrong counts as right."""
    own = choosing._keep_right

    def keep_right(choices: Choices, sequences: list[ShardSequence], drafts: list[int]) -> Choices:
        first = 0
        for sequence, count in zip(sequences, drafts, strict=True):
            if count:
                choices.token_ids[first] = sequence.token_ids[sequence.length]
            first += 1 + count
        return own(choices, sequences, drafts)

    patch.setattr(choosing, "_keep_right", keep_right)


def _pixels_let_go(patch: Patch) -> None:
    """Pixels are given up for others before a shard has read them."""
    own = ImagePins.pin

    def pin(pins: ImagePins, sequence: Sequence) -> bool:
        found = own(pins, sequence)
        places = dict(sequence.places)
        pins.release(sequence)
        sequence.places = places if found else {}
        return found

    patch.setattr(ImagePins, "pin", pin)
    patch.setattr(ImagePins, "_unpin", _unpin_what_is_pinned)


def _unpin_what_is_pinned(pins: ImagePins, sequence: Sequence, which: int) -> None:
    with suppress(RuntimeError, KeyError):
        if pins._pixels is not None:
            pins._pixels.unpin(sequence.request.images[which])


def _prefix_of_any_image(patch: Patch) -> None:
    """In the keys of prefixes all images are the same."""
    patch.setattr(ImagePrefixes, "_number", lambda prefixes, content: 0)


def _features_of_another(patch: Patch) -> None:
    """Features that are kept are found for other images of as many."""
    own = FeatureStore.find

    def find(store: FeatureStore, key: bytes) -> ImageFeatures | None:
        return own(store, key) or next(iter(store._kept.values()), None)

    patch.setattr(FeatureStore, "find", find)


def _features_forgotten(patch: Patch) -> None:
    """A prompt whose first part is computed, or found, is computed on as if it were text."""
    own = HeldImage.between

    def between(image: HeldImage, first: int, end: int) -> PlacedFeatures | None:
        return None if first > image.positions[0] else own(image, first, end)

    patch.setattr(HeldImage, "between", between)


def _row_in_two_batches(patch: Patch) -> None:
    """A row is in two micro-batches at a time: the second does not wait for the first's token."""
    own = micro_batches.find_others

    def find_others(
        table: row_table.RowTable, wanted: NDArray[np.int64], count: int
    ) -> NDArray[np.bool_]:
        found = own(table, wanted, count)
        found[:1] = False
        return found

    patch.setattr(batch, "find_others", find_others)


def _other_rows_blocks(patch: Patch) -> None:
    """Ranks that follow read each row's K and V where those of the row before it are."""
    own = plan_frames.decode_plan

    def decode_plan(frame: Frame) -> StepPlan:
        plan = own(frame)
        plan.block_tables = np.roll(plan.block_tables, 1, axis=0)
        return plan

    patch.setattr(follower, "decode_plan", decode_plan)


def _kept_in_another_order(patch: Patch) -> None:
    """Blocks are kept in another order than the tokens that they are of."""
    own = Scheduler.collect_prefixes

    def collect_prefixes(scheduler: Scheduler, budget: Budget) -> Iterator[Collected | None]:
        for found in own(scheduler, budget):
            yield found and found._replace(blocks=found.blocks[1:] + found.blocks[:1])

    patch.setattr(Scheduler, "collect_prefixes", collect_prefixes)


_LLAMA = "llama, kernels, n-grams"
_LLAVA = "llava, kernels"
_CALLED = "llama, kernels, over HTTP"
_ADAPTED = "llama, kernels, adapters, over HTTP"
_SEES, _HEARS = "llava, kernels, over HTTP", "granite_speech, kernels, over HTTP"


class Planted(NamedTuple):
    """A fault, and the companies that are to find it."""

    server: str
    plant: Plant
    # Of some kinds, instead of all: where three or more things have to meet.
    wishes: Mapping[str, frozenset[str]] = MappingProxyType({})
    ways: Mapping[str, frozenset[str]] = MappingProxyType({})


_SHARED = {
    **{"prompt": frozenset({"shared"}), "salt": frozenset({"none"})},
    "adapter": frozenset({"none"}),
}
_CACHED = {"prefixes": frozenset({"cached"})}
# By what is wrong.
PLANTED: Final[Mapping[str, Planted]] = {
    "block tables after a departure": Planted(_LLAMA, _blocks_stay),
    "a cached prefix one token too long": Planted(_LLAMA, _prefix_too_long),
    "a seed by step": Planted(_LLAMA, _seed_by_step),
    "the grammar of a neighbour": Planted(_LLAMA, _neighbours_grammar),
    "the adapter of the row above": Planted(_LLAMA, _adapter_above),
    "words of a replay are the prompt's": Planted(_LLAMA, _prompt_forgotten),
    "counts of drafts": Planted(_LLAMA, _counts_kept, {"repeats": frozenset({"any"})}),
    "snapshots a token late": Planted("lfm2, kernels", _states_late),
    "top tokens of some steps": Planted(_LLAMA, _tops_of_some),
    "settings of other rows": Planted(_LLAMA, _stale_settings),
    "a wrong draft that counts": Planted(_LLAMA, _draft_too_many),
    "pixels that are let go": Planted(_LLAVA, _pixels_let_go),
    "a prefix with another image": Planted(
        *(_LLAVA, _prefix_of_any_image, {"images": frozenset({"first"})}, _CACHED)
    ),
    "features of another image": Planted(_LLAVA, _features_of_another),
    "features of a cut image": Planted(_LLAVA, _features_forgotten),
    "a row in two micro-batches": Planted("llama, kernels, two stages", _row_in_two_batches),
    "blocks of another rank's row": Planted("llama, kernels, two ranks", _other_rows_blocks),
    "a parser for several answers": Planted(_CALLED, planted_calls.share_parser),
    "texts of another adapter": Planted(_ADAPTED, planted_calls.mix_up_texts),
    "an adapter that is given back early": Planted(
        _ADAPTED, planted_calls.give_back_early, ways={"adapters held": frozenset({"one"})}
    ),
    "an adapter that goes with another": Planted(
        *(_ADAPTED, planted_calls.unload_another),
        {"adapter": frozenset({"first", "loaded"})},
    ),
    "a model's own adapter for the next one": Planted(_HEARS, planted_calls.remember_own_adapter),
    "an image of another body": Planted(_SEES, planted_calls.confuse_images),
    "bytes of images that stay held": Planted(_SEES, planted_calls.hold_bytes),
    "a thought where another one was": Planted(_CALLED, planted_calls.remember_place),
    "a response of somebody else": Planted(_CALLED, planted_calls.find_newest),
    "a turn that is forgotten": Planted(_CALLED, planted_calls.forget_turns),
    "another one's gap": Planted(_CALLED, planted_calls.mix_up_gaps),
    "a deadline for another one": Planted(_CALLED, planted_calls.expire_another),
    "departures that are counted twice": Planted(_CALLED, planted_calls.count_twice),
    "a patient one that is lost": Planted(_CALLED, planted_calls.lose_patient),
    "kept blocks in another order": Planted(
        *(_LLAMA, _kept_in_another_order, _SHARED, _CACHED | {"restart": frozenset({"one"})})
    ),
}
