"""Records the calls of a scheduler with their results, and replays them as a test.

A trace is JSON lines: the limits, then one line per call with its arguments and its result.
Replaying makes the same calls on a fresh scheduler, compares every result, and checks the
invariants after every call. So a trace from production is a regression test as it is.

Prompts are recorded as token ids. `veil` (an odd number) disguises them: every id is multiplied by
it modulo 2^31, which keeps equal ids equal and different ones different; scheduling sees no more.
Of images, the trace has their places, a hash of key and veil, and whether pixels were available.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from tgi_trio.errors import Overloaded
from tgi_trio.ipc.images import ArenaPlace
from tgi_trio.ipc.messages import Fault, SamplingParameters, StepReport
from tgi_trio.router.media.layouts.layout import ImageSize
from tgi_trio.router.media.prompt_image import PromptImage
from tgi_trio.router.request import Request, StoppingCriteria
from tgi_trio.router.scheduling.image_pins import Pixels
from tgi_trio.router.scheduling.kept_prefixes import KeptPrefixes, KeptRun
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.scheduler import Scheduler
from tgi_trio.router.scheduling.shard_commands import (
    Command,
    Copy,
    Extend,
    Filter,
    Limits,
    Prefill,
    Progress,
)

_STEP_FIELDS = tuple(field.name for field in fields(StepReport))
# No decision depends on these columns.
_PASSED_THROUGH = ("logprobs", *(name for name in _STEP_FIELDS if "top_" in name))
_ID_SPACE = 1 << 31


class TraceMismatch(Exception):
    """A replayed scheduler answered differently."""


class _NotedPixels:
    """A store of pixels that records whether those asked for were available."""

    def __init__(self, pixels: Pixels) -> None:
        self._pixels = pixels
        self._found: list[bool] = []

    def pin(self, image: PromptImage) -> ArenaPlace | None:
        place = self._pixels.pin(image)
        self._found.append(place is not None)
        return place

    def unpin(self, image: PromptImage) -> None:
        self._pixels.unpin(image)

    def take_found(self) -> list[bool]:
        """Return the answers since the last call, in order."""
        found, self._found = self._found, []
        return found


class _PlayedPixels:
    """A store of pixels that are available when the trace says so."""

    def __init__(self) -> None:
        self.found: deque[bool] = deque()  # recorded answers, for the coming questions

    def pin(self, image: PromptImage) -> ArenaPlace | None:
        if not self.found:
            raise TraceMismatch("an image is asked for that was not, when the trace was recorded")
        return ArenaPlace(0, 0) if self.found.popleft() else None

    def unpin(self, image: PromptImage) -> None:
        return None


class RecordingScheduler(Scheduler):
    """A scheduler that writes every call that changes it as one line of JSON."""

    def __init__(
        self, limits: SchedulingLimits, write: Callable[[str], object], veil: int = 1
    ) -> None:
        """`write` takes a line with its newline. Raises ValueError for an even `veil`."""
        if veil % 2 == 0:
            raise ValueError(f"veil must be odd to keep different tokens different, not {veil}")
        super().__init__(limits)
        self._write = write
        self._veil = veil
        self._noted: _NotedPixels | None = None  # no request has any images
        self._line({"limits": asdict(limits)})

    def _line(self, record: dict[str, Any]) -> None:
        self._write(json.dumps(record, separators=(",", ":")) + "\n")

    def _anonymise(self, ids: Iterable[int]) -> list[int]:
        return [id * self._veil % _ID_SPACE for id in ids]

    def use_pixels(self, pixels: Pixels) -> None:
        self._noted = _NotedPixels(pixels)
        super().use_pixels(self._noted)

    def add(self, sequence_id: int, request: Request, now: float) -> None:
        record = {"do": "add", "id": sequence_id, "now": now, "request": self._request(request)}
        try:
            super().add(sequence_id, request, now)
        except Overloaded as error:
            self._line(record | {"out": type(error).__name__})
            raise
        self._line(record | {"out": None})

    def _request(self, request: Request) -> dict[str, Any]:
        return {
            "prompt": self._anonymise(request.prompt_ids.tolist()),
            "max_new": request.stopping.max_new_tokens,
            "min_new": request.stopping.min_new_tokens,
            "priority": request.priority,
            "deadline": request.deadline,
            "salt": request.cache_salt,
            "adapter": request.sampling.adapter,
            "prompt_logprobs": request.sampling.prompt_logprobs,
            "emitted": self._anonymise(list(request.emitted)),
            "images": [self._image(image) for image in request.images],
        }

    def _image(self, image: PromptImage) -> list[Any]:
        key = hashlib.sha256(self._veil.to_bytes(8, "little") + image.key).hexdigest()
        return [image.first, image.tokens, image.feature_places, image.size, key]

    def abort(self, sequence_id: int, now: float) -> bool:
        out = super().abort(sequence_id, now)
        self._line({"do": "abort", "id": sequence_id, "now": now, "out": out})
        return out

    def finish(self, sequence_id: int, now: float) -> None:
        super().finish(sequence_id, now)
        self._line({"do": "finish", "id": sequence_id, "now": now, "out": None})

    def expire(self, now: float, most: int | None = None) -> list[int]:
        out = super().expire(now, most)
        if out:
            self._line({"do": "expire", "now": now, "most": most, "out": out})
        return out

    def evict_adapter(self, adapter: int, now: float) -> None:
        super().evict_adapter(adapter, now)
        self._line({"do": "evict_adapter", "adapter": adapter, "now": now, "out": None})

    def commit(self, step: StepReport, now: float) -> list[Progress]:
        out = super().commit(step, now)
        report = {name: value for name in _STEP_FIELDS if (value := getattr(step, name))}
        for name in _PASSED_THROUGH:
            report.pop(name, None)
        if "prompt_logprobs" in report:
            report["prompt_logprobs"] = [0.0] * len(step.prompt_logprobs)
        if "token_ids" in report:
            report["token_ids"] = self._anonymise(step.token_ids)
        brief = [[p.sequence_id, len(p.token_ids), int(p.finish)] for p in out]
        self._line({"do": "commit", "now": now, "step": report, "out": brief})
        return out

    def fault(self, faults: list[Fault], acknowledged: int, now: float) -> list[int]:
        out = super().fault(faults, acknowledged, now)
        ids = [fault.sequence for fault in faults]
        self._line(
            {"do": "fault", "ids": ids, "acknowledged": acknowledged, "now": now, "out": out}
        )
        return out

    def shard_lost(self, now: float) -> list[int]:
        out = super().shard_lost(now)
        self._line({"do": "shard_lost", "now": now, "out": out})
        return out

    def restore_prefixes(self, kept: KeptPrefixes, on_device: int) -> None:
        super().restore_prefixes(kept, on_device)
        runs = [
            [run.salt, run.parent, self._anonymise(run.token_ids), list(run.snapshots)]
            for run in kept.runs
        ]
        record = {"do": "restore_prefixes", "now": 0.0, "runs": runs, "on_device": on_device}
        self._line(record | {"out": None})

    def schedule(self, now: float) -> list[Command]:
        out = super().schedule(now)
        found = self._noted.take_found() if self._noted is not None else []
        record = {"do": "schedule", "now": now} | ({"pinned": found} if found else {})
        self._line(record | {"out": [summarise_command(command) for command in out]})
        return out


def summarise_command(command: Command) -> list[Any]:
    """Return what a trace keeps of a command: everything that was decided."""
    match command:
        case Limits(number, budget):
            return ["limits", number, budget]
        case Filter(number, sequences):
            return ["filter", number, sequences]
        case Copy(number, transfers):
            return ["copy", number, [list(each) for each in transfers]]
        case Extend(number, extends):
            return ["extend", number, [[row.sequence, list(row.block_ids)] for row in extends]]
        case Prefill(number, rows):
            cut = [
                [row.sequence, len(row.token_ids), row.cached_length, list(row.block_ids)]
                for row in rows
            ]
            return ["prefill", number, cut]


def replay(lines: Iterable[str], check_every: int = 1) -> Scheduler:
    """Play a trace and return the scheduler as it is at the end.

    Raises TraceMismatch at the first answer that differs, AssertionError at the first invariant
    that is broken (looked at after every `check_every` calls).
    """
    records = (json.loads(line) for line in lines if line.strip())
    scheduler = Scheduler(SchedulingLimits(**next(records)["limits"]))
    pixels = _PlayedPixels()
    scheduler.use_pixels(pixels)
    for number, record in enumerate(records, start=2):
        pixels.found = deque(record.get("pinned", ()))
        out = _play(scheduler, record)
        if out != record["out"]:
            raise TraceMismatch(f"line {number}: {record['do']} gave {out}, not {record['out']}")
        if number % check_every == 0:
            scheduler.check()
    scheduler.check()
    return scheduler


def _play(scheduler: Scheduler, record: dict[str, Any]) -> Any:
    now = record["now"]
    match record["do"]:
        case "add":
            try:
                scheduler.add(record["id"], _request(record["request"]), now)
            except Overloaded as error:
                return type(error).__name__
            return None
        case "abort":
            return scheduler.abort(record["id"], now)
        case "finish":
            return scheduler.finish(record["id"], now)
        case "expire":
            return scheduler.expire(now, record.get("most"))
        case "evict_adapter":
            return scheduler.evict_adapter(record["adapter"], now)
        case "commit":
            progress = scheduler.commit(_step(record["step"]), now)
            return [[p.sequence_id, len(p.token_ids), int(p.finish)] for p in progress]
        case "fault":
            faults = [Fault(id, "") for id in record["ids"]]
            return scheduler.fault(faults, record["acknowledged"], now)
        case "shard_lost":
            return scheduler.shard_lost(now)
        case "restore_prefixes":
            size, runs = scheduler.limits.block_size, (_run(*run) for run in record["runs"])
            kept = KeptPrefixes(size, tuple(runs))
            return scheduler.restore_prefixes(kept, record["on_device"])
        case "schedule":
            return [summarise_command(command) for command in scheduler.schedule(now)]
        case unknown:
            raise TraceMismatch(f"a trace cannot do {unknown!r}")


def _request(record: dict[str, Any]) -> Request:
    sampling = SamplingParameters(
        adapter=record["adapter"], prompt_logprobs=record["prompt_logprobs"]
    )
    return Request(
        prompt_ids=np.array(record["prompt"], dtype=np.int32),
        sampling=sampling,
        stopping=StoppingCriteria(record["max_new"], record["min_new"]),
        priority=record["priority"],
        deadline=record["deadline"],
        cache_salt=record["salt"],
        emitted=tuple(record.get("emitted", ())),
        images=tuple(_image(*image) for image in record.get("images", ())),
    )


def _image(
    first: int, tokens: int, runs: list[list[int]], size: list[int], key: str
) -> PromptImage:
    places = tuple((offset, count) for offset, count in runs)
    return PromptImage(first, tokens, places, ImageSize(*size), bytes.fromhex(key), b"")


def _run(salt: str, parent: int, tokens: list[int], snapshots: list[int]) -> KeptRun:
    return KeptRun(salt, parent, np.array(tokens, np.int32).tobytes(), tuple(snapshots))


def _step(record: dict[str, Any]) -> StepReport:
    step = StepReport(**({"step": 0, "acknowledged": 0} | record))
    rows = len(step.sequence)
    for name in ("computed", "token_count", "prompt_count", "finish"):
        if not getattr(step, name):
            setattr(step, name, [0] * rows)
    step.logprobs = [0.0] * len(step.token_ids)
    step.top_count = [0] * len(step.token_ids)
    return step
