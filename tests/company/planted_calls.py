"""Faults of what is called over HTTP, planted one at a time."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.adapters.served_adapter import ServedAdapter
from tgi_trio.router.adapters.text_processors import TextProcessors
from tgi_trio.router.engine.engine_metrics import EngineMetrics
from tgi_trio.router.http.response_store import ResponseStore, StoredResponse
from tgi_trio.router.media.byte_budget import ByteBudget, HeldBytes
from tgi_trio.router.media.media_reader import MediaReader
from tgi_trio.router.scheduling.queue import WaitingQueue
from tgi_trio.router.scheduling.scheduler import Scheduler
from tgi_trio.router.scheduling.sequence import Sequence
from tgi_trio.router.text.answer import AnswerParser
from tgi_trio.router.text.answer_form import ReadForm
from tgi_trio.router.text.infill import Gap, InfillFormat
from tgi_trio.router.text.text_processor import TextProcessor
from tgi_trio.router.text.thoughts.place import Place, find_place

Patch = pytest.MonkeyPatch


def share_parser(patch: Patch) -> None:
    """Answers to one call are read by one parser."""
    own, found = ReadForm.read, dict[int, tuple[ReadForm, AnswerParser]]()

    def read(form: ReadForm) -> AnswerParser:
        return found.setdefault(id(form), (form, own(form)))[1]

    patch.setattr(ReadForm, "read", read)


def mix_up_texts(patch: Patch) -> None:
    """An adapter has the tokenizer and the template of the one that was used before it."""
    own = TextProcessors.find

    async def find(processors: TextProcessors, adapter: ServedAdapter) -> TextProcessor:
        before = next(iter(processors._kept.values()), None)
        return await own(processors, adapter) if before is None else before

    patch.setattr(TextProcessors, "find", find)


def give_back_early(patch: Patch) -> None:
    """An adapter may be unloaded as soon as a request has got it."""
    own = AdapterRegistry.acquire

    async def acquire(registry: AdapterRegistry, adapter: ServedAdapter) -> None:
        await own(registry, adapter)
        adapter.users -= 1
        registry._tidy(adapter)

    patch.setattr(AdapterRegistry, "acquire", acquire)
    patch.setattr(AdapterRegistry, "release", lambda registry, adapter: registry._tidy(adapter))


def unload_another(patch: Patch) -> None:
    """With an adapter that is unloaded, the first one is not served any more either."""
    own = AdapterRegistry.unload

    def unload(registry: AdapterRegistry, name: str) -> None:
        own(registry, name)
        for other in registry.names[:1]:
            own(registry, other)

    patch.setattr(AdapterRegistry, "unload", unload)


def remember_own_adapter(patch: Patch) -> None:
    """Behind a prompt with a sound, the next one has the model's own adapter as well."""
    own, last = AdapterRegistry.find_own, list[ServedAdapter]()

    def find_own(registry: AdapterRegistry, kinds: Container[str]) -> ServedAdapter | None:
        found = own(registry, kinds)
        if found is not None:
            last.append(found)
            return found
        return last.pop() if last and registry._by_number.get(last[-1].number) is last[-1] else None

    patch.setattr(AdapterRegistry, "find_own", find_own)


def confuse_images(patch: Patch) -> None:
    """Images of different bytes are known by one key."""
    own = MediaReader._make_key
    patch.setattr(MediaReader, "_make_key", lambda reader, data, kind: own(reader, b"", kind))


def hold_bytes(patch: Patch) -> None:
    """Bytes of images stay held, but for one, when a request has ended."""

    @contextmanager
    def hold(budget: ByteBudget) -> Iterator[HeldBytes]:
        held = HeldBytes(budget)
        yield held
        budget.used -= min(held.nbytes, 1)

    patch.setattr(ByteBudget, "hold", hold)


def remember_place(patch: Patch) -> None:
    """Answers begin inside a thought, or behind it, as that of the call before does."""
    before = list[Place]()

    def remembered(*given: Any) -> Place:
        before.append(find_place(*given))
        return before[-2:][0]

    patch.setattr("tgi_trio.router.http.preparing.find_place", remembered)


def find_newest(patch: Patch) -> None:
    """Calls go on from the response that was kept last."""

    def find(store: ResponseStore, id: str, caller: bytes) -> StoredResponse | None:
        kept = [each for each in store._kept.values() if isinstance(each, StoredResponse)]
        return kept[-1] if id in store._kept else None

    patch.setattr(ResponseStore, "find", find)


def forget_turns(patch: Patch) -> None:
    """With a response, what was asked and answered in it is forgotten for all that need it."""
    own = ResponseStore._drop

    def drop(store: ResponseStore, id: str) -> None:
        dropped = store._kept[id]
        own(store, id)
        if isinstance(dropped, StoredResponse):
            dropped.turn.given = dropped.turn.answered = b"[]"

    patch.setattr(ResponseStore, "_drop", drop)


def mix_up_gaps(patch: Patch) -> None:
    """Behind a gap stands what stood behind the one before."""
    own, before = InfillFormat.write, list[Gap]()

    def write(form: InfillFormat, gap: Gap, tokens: Collection[str]) -> str:
        before.append(gap)
        return own(form, replace(gap, behind=before[-2:][0].behind), tokens)

    patch.setattr(InfillFormat, "write", write)


def expire_another(patch: Patch) -> None:
    """With a request that has timed out, the oldest one ends as well."""
    own = Scheduler.expire

    def expire(scheduler: Scheduler, now: float, most: int | None = None) -> list[int]:
        found = own(scheduler, now, most)
        for oldest in list(scheduler._sequence_table.living.values())[: len(found)]:
            scheduler.abort(oldest.id, now)
            found.append(oldest.id)
        return found

    patch.setattr(Scheduler, "expire", expire)


def count_twice(patch: Patch) -> None:
    """Who leaves is counted as one who has failed as well."""
    own = EngineMetrics.count_left

    def count_left(metrics: EngineMetrics, phase: str) -> None:
        own(metrics, phase)
        metrics.count_ended(None)

    patch.setattr(EngineMetrics, "count_left", count_left)


def lose_patient(patch: Patch) -> None:
    """A patient one that comes back is not let in again."""
    own = WaitingQueue.add

    def add(queue: WaitingQueue, sequence: Sequence) -> None:
        if not (sequence.priority > 0 and sequence.emitted):
            own(queue, sequence)

    patch.setattr(WaitingQueue, "add", add)
