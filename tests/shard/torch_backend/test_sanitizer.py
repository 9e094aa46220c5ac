"""The sanitizer finds what has been planted, and nothing in kernels without a defect."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tests.support import sanitized

need_triton()
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="NVIDIA's own is for devices")

from tests.shard.torch_backend import planted_kernels as planted  # noqa: E402  (imports Triton)
from tests.shard.torch_backend.test_overlapping_kernels import functions  # noqa: E402
from tgi_trio.shard.ranks.distributed import ProcessGroup, gloo_group  # noqa: E402
from tgi_trio.shard.torch_backend import torch_device  # noqa: E402
from tgi_trio.testing.sanitizer import far  # noqa: E402
from tgi_trio.testing.sanitizer.expected import EXPECTED  # noqa: E402
from tgi_trio.testing.sanitizer.findings import Expected  # noqa: E402
from tgi_trio.testing.sanitizer.sanitizer import Sanitizer  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.stand_in_group import StandInGroup  # noqa: E402

INT = torch.int32
Work = Callable[[], object]


def zeros(*sizes: int, dtype: torch.dtype = INT) -> torch.Tensor:
    return torch.zeros(*sizes, dtype=dtype)


def found(work: Work, *expected: Expected) -> list[str]:
    """Return the kinds and arguments of what is found."""
    sanitizer = Sanitizer(expected)
    with sanitizer.on(), sanitizer.host():
        work()
    return kinds(sanitizer)


def kinds(sanitizer: Sanitizer) -> list[str]:
    """Return each kind of defect, with its argument, once."""
    every = (f"{each.kind} {each.argument}".strip() for each in sanitizer.findings.take())
    return sorted(set(every))


def copy(count: int, *, masked: bool) -> None:
    whole = torch.arange(64, dtype=INT)
    out = zeros(count)
    planted.copy[(-(-count // 16),)](out, whole[:count], count, 16, masked)
    assert out.equal(whole[:count]), "what is inside is copied all the same"


def read_in_neighbour() -> None:
    """Both tensors are the kernel's, and one's end leads into the other."""
    both = torch.arange(8, dtype=INT)
    first, second = both[:4].clone(), both[4:].clone()
    offset = (second.data_ptr() - first.data_ptr()) // 4
    planted.read_row[(1,)](second, first, 1, offset, True)


def read_wide(offset: int) -> None:
    planted.read_wide[(1,)](zeros(1), zeros(8, dtype=torch.uint8), offset)


def promise(number: int) -> None:
    planted.promise[(1,)](zeros(1), torch.tensor([number], dtype=INT))


def write_one(*, same: bool) -> None:
    planted.write_one[(3,)](zeros(1), same)


def read_next() -> None:
    planted.read_next[(3,)](zeros(4), zeros(4))


def add_parts(barrier: bool = True, sem: str = "acq_rel", scope: str = "gpu") -> None:
    out, arrived = zeros(128), zeros(1)
    planted.add_parts[(4,)](out, zeros(4, 128), arrived, 128, barrier, sem, scope)
    assert out[0] == 6 and arrived == 0


def turn(*, barrier: bool) -> None:
    planted.turn[(1,)](zeros(128), zeros(128), 128, barrier)


def increase(block: int, *, barrier: bool) -> None:
    planted.increase[(1,)](zeros(block), block, barrier)


def take_first(*, barrier: bool) -> None:
    planted.take_first[(1,)](zeros(1), zeros(128), 128, barrier)


def claim() -> None:
    planted.claim[(5,)](zeros(5), zeros(1))


def count(*, begin: int = 0, resets: bool) -> None:
    counters = torch.tensor([0, begin, 7], dtype=INT)
    planted.count_twice[(3,)](counters, resets)
    assert counters.tolist() == [0, 0 if resets else 3, 7]


def add_two(*, used: bool) -> None:
    x = torch.empty(2, dtype=torch.float32)
    x[0] = 1
    planted.add_two[(1,)](torch.empty(1), x, used)


def launch_many(*grid: int) -> None:
    planted.write_one[grid](zeros(1), True)


def fold() -> None:
    planted.fold[(1,)](zeros(128), 128)


CASES: dict[str, tuple[Work, list[str]]] = {
    "masked": (lambda: copy(20, masked=True), []),
    "not masked": (lambda: copy(60, masked=False), ["bounds out"]),
    "in a neighbour": (read_in_neighbour, ["bounds x"]),
    "aligned": (lambda: read_wide(4), []),
    "not aligned": (lambda: read_wide(2), ["alignment x"]),
    "beyond the end": (lambda: read_wide(6), ["bounds x"]),
    "a multiple": (lambda: promise(48), []),
    "no multiple": (lambda: promise(40), ["hint"]),
    "a grid too large": (lambda: launch_many(1, 1 << 16), ["bounds"]),
    "programs that 32 bits do not count": (lambda: launch_many(1 << 17, 1 << 14), ["bounds"]),
    "no programs": (lambda: launch_many(0, 4), []),
    "two programs write one place": (
        lambda: write_one(same=False),
        ["order out", "race out"],
    ),
    "they write the same": (lambda: write_one(same=True), []),
    "one reads what another writes": (read_next, ["order out", "race x"]),
    "the last of them reads": (add_parts, []),
    "the last without a barrier": (lambda: add_parts(barrier=False), ["race parts"]),
    "the last by a relaxed atomic": (
        lambda: add_parts(sem="relaxed"),
        ["race parts"],
    ),
    "the last by an atomic that only acquires": (lambda: add_parts(sem="acquire"), ["race parts"]),
    "the last by an atomic that only releases": (lambda: add_parts(sem="release"), ["race parts"]),
    "the last by an atomic of a block": (lambda: add_parts(scope="cta"), ["race parts"]),
    "lanes read what others write": (lambda: turn(barrier=False), ["hazard x"]),
    "behind a barrier": (lambda: turn(barrier=True), []),
    "few lanes are held by many threads": (lambda: increase(32, barrier=False), ["copies x"]),
    "few lanes behind a barrier": (lambda: increase(32, barrier=True), []),
    "as many lanes as threads": (lambda: increase(128, barrier=False), []),
    "one lane reads what all have": (lambda: take_first(barrier=False), ["hazard x"]),
    "one lane reads it behind a barrier": (lambda: take_first(barrier=True), []),
    "two lanes write one place": (fold, ["hazard out"]),
    "order": (claim, ["order out"]),
    "counters are reset": (lambda: count(resets=True), []),
    "a counter is not reset": (lambda: count(resets=False), ["counter counters"]),
    "a counter is not zero at first": (
        lambda: count(begin=3, resets=True),
        ["counter counters"],
    ),
    "nothing has written it": (lambda: add_two(used=True), ["unwritten out"]),
    "nothing has written it, nothing uses it": (lambda: add_two(used=False), []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_planted_is_found(case: str) -> None:
    work, expected = CASES[case]
    assert found(work) == expected


def test_it_is_said_where_a_defect_is() -> None:
    sanitizer = Sanitizer()
    with sanitizer.on():
        copy(60, masked=False)
    (one,) = map(str, sanitizer.findings.take())
    assert "bounds: copy, argument out at planted_kernels.py:" in one
    assert "(program (3, 0, 0): 4 lanes, the first at byte 240 of 240)" in one


def test_what_is_expected_is_noted() -> None:
    known = Expected("order", "claim", "out", "any order will do")
    assert found(claim, known) == []
    assert found(claim, known._replace(kernel="another")) == ["order out"]


@pytest.mark.parametrize("wide", [False, True])
def test_offsets_need_64_bits_where_memory_is_large(wide: bool) -> None:
    sanitizer, x, out = Sanitizer(), torch.arange(8, dtype=INT), zeros(1)
    with sanitizer.on():
        sanitizer.place_far(x, 1 << 32)
        planted.read_row[(1,)](out, x, (1 << 20) + 0, 1 << 12, wide)
    assert kinds(sanitizer) == ([] if wide else ["bounds x"])


@pytest.mark.parametrize("wide", [False, True])
def test_slots_are_tried_far_away(monkeypatch: pytest.MonkeyPatch, wide: bool) -> None:
    monkeypatch.setitem(far.FAR, "read_slots", far.Slots(("x",), ("slots",)))
    x, out = torch.arange(12, dtype=INT).view(4, 3), zeros(3)
    slots = torch.tensor([2, 0, 3])
    expected = [] if wide else ["bounds x", "order out"]
    assert found(lambda: planted.read_slots[(3,)](out, x, slots, 3, wide)) == expected
    assert out.tolist() == [6, 0, 9]


def test_what_is_known_of_kernels_is_of_kernels_that_are_there() -> None:
    every = functions()
    known: list[tuple[str, tuple[str, ...]]] = []
    known += [(each.kernel, (each.argument,)) for each in EXPECTED]
    known += [(name, (*own.memory, *own.indices, own.tables)) for name, own in far.FAR.items()]
    for kernel, arguments in known:
        names = {each.arg for each in every[kernel].args.args}
        assert set(arguments) - {""} <= names, kernel


EARLY: Any = {"OVERLAPS": True, "launch_pdl": True}
BEHIND, BEFORE, WRITES, NEVER = range(4)
STEPS: dict[str, tuple[list[str], int, list[str]]] = {
    "it waits": (["late"], BEHIND, []),
    "it reads early": (["late"], BEFORE, ["overlap x"]),
    "it reads early what a normal launch wrote": (["normal"], BEFORE, ["overlap x"]),
    "another that has waited is between": (["normal", "between"], BEFORE, []),
    "another that lets it begin early": (["early", "hasty"], BEFORE, ["overlap x"]),
    "torch writes it": (["torch"], BEFORE, ["overlap x"]),
    "torch is between": (["late", "other torch"], BEFORE, []),
    "it writes early": (["late"], WRITES, ["overlap out"]),
    "it does not wait": (["late"], NEVER, ["overlap"]),
}


@pytest.mark.parametrize("case", STEPS)
def test_kernels_that_begin_early(case: str) -> None:
    before, where, expected = STEPS[case]
    sanitizer = Sanitizer()
    with sanitizer.on(), StandInDevice():
        x, y, out = (torch.zeros(1, dtype=INT, device="cuda:0") for _ in range(3))
        for step in before:
            if step == "torch":
                x.fill_(1)
            elif step == "other torch":
                y.fill_(1)
            elif step == "normal":
                planted.produce[(1,)](x, OVERLAPS=False, WAITS_FIRST=True)
            else:
                into = x if step in ("late", "early") else y
                planted.produce[(1,)](into, WAITS_FIRST=step in ("late", "between"), **EARLY)
        planted.consume[(1,)](out, x, where, **EARLY)
    assert [
        f"{each.kind} {each.argument}".strip() for each in sanitizer.findings.take()
    ] == expected


def test_modules_that_are_imported_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, module = torch_device.overlap, ModuleType("imported")
    with Sanitizer().on():
        monkeypatch.setitem(sys.modules, "imported", module)
        vars(module)["overlap"] = torch_device.overlap
        assert module.overlap is not plain
    assert module.overlap is plain


def test_recordings_that_are_older_than_the_sanitizer() -> None:
    x, y, out = (torch.zeros(1, dtype=INT) for _ in range(3))

    def work() -> torch.Tensor:
        planted.produce[(1,)](x, WAITS_FIRST=True, **EARLY)
        y.fill_(1)  # waits for everything before it
        planted.consume[(1,)](out, x, BEFORE, **EARLY)
        return out

    with StandInDevice():
        x, y, out = (each.to("cuda:0") for each in (x, y, out))
        with Sanitizer().on():
            graph, _ = record(work)
        sanitizer = Sanitizer()
        with sanitizer.on():
            graph.replay()
    assert kinds(sanitizer) == []


@pytest.mark.parametrize("waits", [False, True])
def test_pinned_memory_is_left_alone_until_it_has_been_read(waits: bool) -> None:
    sanitizer = Sanitizer()
    with sanitizer.on(), StandInDevice():
        memory = torch.zeros(4).pin_memory()
        memory.to("cuda:0", non_blocking=True)
        event: Any = torch.Event()
        event.record()
        if waits:
            event.synchronize()
        memory.fill_(1)
        event.synchronize()
    assert kinds(sanitizer) == ([] if waits else ["pinned"])


def record(work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """Return a recording of work, and what it returns."""
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, work()


def test_a_recording_finds_other_numbers_in_its_memory_each_time() -> None:
    sanitizer, inside = Sanitizer(), list[torch.Tensor]()

    def work() -> torch.Tensor:
        inside.append(torch.empty(2, device="cuda:0"))
        out = torch.zeros(1, device="cuda:0")
        planted.add_two[(1,)](out, inside[0], True)
        return out

    with sanitizer.on(), StandInDevice():
        graph, _ = record(work)
        inside[0].fill_(1)
        graph.replay()
    assert kinds(sanitizer) == ["unwritten out"]


@pytest.mark.parametrize("between", [False, True])
def test_a_recording_overwrites_results_of_those_captured_later(between: bool) -> None:
    sanitizer = Sanitizer()
    with sanitizer.on(), StandInDevice():
        first, _ = record(lambda: torch.empty(2, device="cuda:0").fill_(1))
        second, x = record(lambda: torch.empty(2, device="cuda:0").fill_(2))
        for graph in (first, second, *[first] * between):
            graph.replay()
        planted.add_two[(1,)](torch.zeros(1, device="cuda:0"), x, True)
    assert kinds(sanitizer) == (["unwritten out"] if between else [])


def test_what_ranks_have_gathered_is_written() -> None:
    sanitizer = Sanitizer()
    with sanitizer.on(), StandInDevice() as device:
        gloo = StandInGroup(gloo_group(HashStore(), 0, 1), device)
        group = ProcessGroup(gloo, 0, 1)
        parts = group.all_gather(torch.zeros(1, 2, device="cuda:0"))
        planted.add_two[(1,)](torch.zeros(1, device="cuda:0"), parts, True)
        gloo.close()
    assert kinds(sanitizer) == []


def test_tests_that_are_always_watched_are_there() -> None:
    for test in sanitized.ALWAYS:
        file, name = test.split("::")
        source = (Path(__file__).parents[3] / file).read_text()
        assert f"def {name.partition('[')[0]}" in source, test
        assert sanitized.is_watched(test)
