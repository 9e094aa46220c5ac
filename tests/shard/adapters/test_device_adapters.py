"""Adapters over a stand-in device say what they say on the CPU, and nothing waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.shard.adapters.peft_support import (
    AROUND_LATENTS,
    PADDED,
    adapted,
    install,
    write_adapter,
)
from tests.shard.torch_backend.device_kinds import SMALL
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import BLOCK, generated, prompts, run, sequences

need_triton()

from tests.shard.loop.scripted_router import row  # noqa: E402  (Triton's)
from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402
from tests.shard.torch_backend.stand_in_shard import device_shard  # noqa: E402
from tests.shard.torch_backend.stand_in_support import (  # noqa: E402
    REQUEST,
    Foretelling,
    LayerOutput,
    agree,
    drive,
    start,
)
from tgi_trio.errors import ConfigurationError, TgiTrioError  # noqa: E402
from tgi_trio.ipc.adapters import AdapterOrder  # noqa: E402
from tgi_trio.ipc.messages import PrefillRow  # noqa: E402
from tgi_trio.shard.runner import Runner  # noqa: E402
from tgi_trio.shard.torch_backend.adapters import device_adapters  # noqa: E402
from tgi_trio.shard.torch_backend.adapters.device_adapters import DeviceAdapters  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402
from tgi_trio.shard.torch_backend.layers.adapters import slotted_linear  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears import code_tiles, coded_linear  # noqa: E402
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner  # noqa: E402
from tgi_trio.testing import stand_in_driver  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

TEXTS = prompts(5, longest=2 * BLOCK)
ADAPTERS = (1, 0, 2, 1, 3)
MORE: tuple[dict[str, Any], ...] = (
    *({}, {"sample": True, "top_k": 20}, {}),
    *({"repetition_penalty": 1.3}, {}),
)
ASKED = [{"adapter": number, **more} for number, more in zip(ADAPTERS, MORE, strict=True)]
KEPT = (
    "numbers",
    "directory",
    "tokens",
    "embeddings",
    "rank",
)  # of an adapter, each in memory of its own
NONE: list[dict[str, Any]] = [asked | {"adapter": 0} for asked in ASKED]
SERVED: dict[str, Any] = {"max_lora_rank": 16, "max_loaded_adapters": 3}
Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an interpreter, which has but one, not do the work of hundreds."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)
    few, some = (tile._replace(outputs=256) for tile in code_tiles._WIDE_TILES)
    monkeypatch.setattr(code_tiles, "_WIDE_TILES", (few, some))
    monkeypatch.setattr(coded_linear, "_PROGRAMS", 4)
    small, large = (tile._replace(inputs=128, outputs=256) for tile in slotted_linear._WIDE_TILES)
    monkeypatch.setattr(slotted_linear, "_WIDE_TILES", slotted_linear.AdapterTiles(small, large))


def write_three(base: Path, folder: Path) -> list[Path]:
    """All linears of layers and the embeddings of some tokens, queries alone with magnitudes, for
    a vocabulary of another size, and a part with ranks of their own, biases, and the head.
    """
    tokens = sorted({*TEXTS[0][:8], *TEXTS[3][:8]})
    configs: tuple[dict[str, Any], ...] = (
        {"r": 16, "trainable_token_indices": {"embed_tokens": tokens}},
        {"r": 1, "target_modules": ["q_proj"], "use_dora": True, "tokens": PADDED},
        {
            "r": 3,
            "lora_bias": True,
            "target_modules": ["v_proj", "up_proj", "down_proj", "lm_head"],
            "rank_pattern": {"up_proj": 9},
        },
    )
    return [
        write_adapter(base, folder / str(i), seed=i, **config) for i, config in enumerate(configs)
    ]


def install_all(runner: Runner, folders: list[Path]) -> None:
    for number, folder in enumerate(folders, start=1):
        install(runner, number, folder)


def on_cpu(
    base: Path, folders: list[Path], asked: list[dict[str, Any]], budget: int = 100, **settings: Any
) -> LayerOutput:
    runner = start(base, "cpu", **settings)
    install_all(runner, folders)
    return drive(runner, TEXTS, asked, 3, budget=budget)


@pytest.fixture(scope="module")
def llama(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = checkpoint("llama", **SMALL)
    return base, write_three(base, tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("graphs", [(5,), ()], ids=["recorded", "launched"])
def test_a_batch_of_any_adapters_and_none(llama: Any, graphs: tuple[int, ...]) -> None:
    base, folders = llama
    expected = on_cpu(base, folders, ASKED, **SERVED)
    assert expected.tokens != on_cpu(base, folders, NONE, **SERVED).tokens
    with StandInDevice() as device:
        runner = start(base, "cuda:0", graphs, **SERVED)
        waits = device.counts.waits.copy()
        install_all(runner, folders)
        assert device.counts.waits == waits  # nobody waits for what is copied
        ours = drive(runner, TEXTS, ASKED, 3, device=device)
        agree(ours, expected)
        for counts in ours.decodes:
            assert counts.replays == len(graphs), counts
            assert bool(counts.launches) == (not graphs), counts
        plain = drive(runner, TEXTS, NONE, 3, device=device)  # loaded, and of no step's rows
        assert not any("shrink_rows" in counts.launches for counts in plain.decodes)
        fewer = [
            after.sent - before.sent
            for after, before in zip(plain.decodes, ours.decodes, strict=True)
        ]
        assert not graphs or set(fewer) == {-1}  # the copy that says who has which
    agree(plain, on_cpu(base, folders, NONE, **SERVED))


@pytest.mark.parametrize("few", [64, 0], ids=["small tiles", "large tiles"])
def test_steps_with_prompts_are_recorded_as_well(
    llama: Any, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """In chunks and beside decodes; those of which no row has an adapter launch nothing for any."""
    base, folders = llama
    monkeypatch.setattr(device_adapters, "FEW_TOKENS", few)
    expected = on_cpu(base, folders, ASKED, 20, **SERVED)
    with StandInDevice() as device:
        request = replace(REQUEST, max_prefill_tokens=20)
        runner = start(base, "cuda:0", (1, 5), request=request, **SERVED)
        install_all(runner, folders)
        ours = drive(runner, TEXTS, ASKED, 3, device=device, budget=20)
        plain = drive(runner, TEXTS, NONE, 3, device=device, budget=20)
    agree(ours, expected)
    assert len(ours.prefills) > 2
    for counts in (*ours.prefills, *plain.prefills):
        assert counts.replays == 1 and not counts.launches, counts
    # The copy that says who has which.
    both = zip(ours.prefills, plain.prefills, strict=True)
    assert {with_some.sent - without.sent for with_some, without in both} == {1}


def test_prompts_logprobs_are_of_the_adapted_head(llama: Any) -> None:
    """Whose rows are other tokens than those that others are chosen after."""
    base, folders = llama
    asked = [{"adapter": number, "prompt_logprobs": True} for number in ADAPTERS]
    expected = on_cpu(base, folders, asked, 20, **SERVED)
    with StandInDevice() as device:
        request = replace(REQUEST, max_prefill_tokens=20)
        runner = start(base, "cuda:0", (5,), request=request, **SERVED)
        install_all(runner, folders)
        ours = drive(runner, TEXTS, asked, 3, device=device, budget=20)
    assert ours.prompts
    agree(ours, expected)


def test_each_linear_takes_two_launches_more(llama: Any) -> None:
    """And none where no row has an adapter, nor does another warm-up lose what is loaded."""
    base, folders = llama
    with StandInDevice() as device:
        runner = start(base, "cuda:0", **SERVED)
        install_all(runner, folders)
        host = runner.adapters
        assert isinstance(runner, TorchRunner) and isinstance(host, DeviceAdapters)
        with device.idle():
            told = runner.warm_up(REQUEST)
        assert told.weight_bytes == runner.model.nbytes() + host.nbytes and host.nbytes > 0
        launches = []
        for number in (1, 0):
            rows = adapted(sequences(TEXTS[:1], new=1), [number])
            device.counts.launches.clear()
            run(runner, rows)
            launches.append(device.counts.launches.copy())
    more = launches[0] - launches[1]
    # Of each of four, and of the head; and one for all embeddings.
    assert more == {"shrink_rows": 5, "expand_rows": 5, "place_embeddings": 1, "add_embeddings": 1}


def test_drafts_have_the_adapter_of_their_row(llama: Any) -> None:
    base, folders = llama
    expected = on_cpu(base, folders, ASKED, **SERVED)
    with StandInDevice() as device:
        runner = start(base, "cuda:0", (5, 16), speculate=2, **SERVED)
        install_all(runner, folders)
        drafting = Foretelling(expected.tokens)
        ours = drive(runner, TEXTS, ASKED, 3, device=device, drafter=drafting)
    assert ours.tokens == expected.tokens and ours.drafts
    # A text that the device lacks is sent to it, where n-grams would be looked up.
    assert all(counts.replays == 1 for counts in ours.decodes)
    assert all(set(counts.launches) <= {"write_texts"} for counts in ours.decodes)


def test_a_slot_is_taken_again(llama: Any) -> None:
    """By another adapter, beside a recorded step's memory, and steps wait for no other's copy."""
    base, folders = llama
    asked = [{"adapter": number} for number in (0, 5, 0, 5, 4)]
    cpu = start(base, "cpu", **SERVED)
    for number, folder in ((4, folders[2]), (5, folders[0])):
        install(cpu, number, folder)
    expected = drive(cpu, TEXTS, asked, 3)
    with StandInDevice() as device:
        runner = start(base, "cuda:0", (5,), max_lora_rank=16, max_loaded_adapters=2)
        host = runner.adapters
        assert host is not None
        install_all(runner, folders[:2])
        drive(runner, TEXTS[:2], ASKED[:2], 2)
        with pytest.raises(TgiTrioError, match="all 2 slots of the device"):
            install(runner, 3, folders[2])
        for number in (1, 2, 2, 7):
            host.drop(number)
        install(runner, 5, folders[0])
        install(runner, 4, folders[2])
        before = device.counts.stream_waits
        rows = adapted(sequences(TEXTS[:1], new=1), [0])
        run(runner, rows)
        assert device.counts.stream_waits == before
        agree(drive(runner, TEXTS, asked, 3, device=device), expected)
        loaded = host.load(AdapterOrder(9, folders[0]))
        assert loaded.rank == 16 and loaded.nbytes > 0
    assert generated(rows[0])


def test_memory_that_adapters_came_by_is_that_of_later_ones(llama: Any) -> None:
    """torch may end the process where it takes pinned memory of a lost device back."""
    base, folders = llama
    with StandInDevice() as device:
        runner = start(base, "cuda:0", **SERVED)
        host = runner.adapters
        assert isinstance(host, DeviceAdapters)
        device.counts.pinned = 0
        for number in range(4, 10):
            install(runner, number, folders[number % 2])
            host.drop(number)
        host.load(AdapterOrder(10, folders[0]))  # and has been dropped before it was there
        kept = device.counts.pinned
        assert not device.counts.unpinned
    assert 0 < kept <= 2 * len(("being loaded", "being copied")) * len(KEPT)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["gpt2", "phi3", "falcon", "minicpm3"])
def test_pairs_of_fused_matrices(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """One A for queries, keys and values, or for gate and up, however they are stored; and those
    around latents; with an embedding that has A and B, also with DoRA.
    """
    targets: Any = AROUND_LATENTS.get(family, "all-linear")
    last = ["qkv_proj", "embed_tokens"] if family == "phi3" else targets
    plain = [each for each in targets if each != "kv_b_proj"] if family == "minicpm3" else last
    base = checkpoint(family, **({"n_layer": 1} if family == "gpt2" else SMALL))
    folders = [
        write_adapter(base, tmp_path / "4", seed=4, use_dora=True, target_modules=plain),
        write_adapter(base, tmp_path / "3", seed=3, r=3, target_modules=targets),
        write_adapter(base, tmp_path / "1", seed=1, r=1, target_modules=last),
    ]
    expected = on_cpu(base, folders, ASKED, **SERVED)
    with StandInDevice() as device:
        runner = start(base, "cuda:0", (5,), **SERVED)
        install_all(runner, folders)
        agree(drive(runner, TEXTS, ASKED, 3, device=device), expected)


def test_quantised_bases(llama: Any) -> None:
    """What is added comes behind the product with codes."""
    base, folders = llama
    settings: dict[str, Any] = {**SERVED, "quantize": "int4"}
    expected = on_cpu(base, folders, ASKED, **settings)
    with StandInDevice() as device:
        runner = start(base, "cuda:0", (5,), **settings)
        assert device.counts.launches["multiply_codes"]
        install_all(runner, folders)
        ours = drive(runner, TEXTS, ASKED, 3, device=device)
    agree(ours, expected)
    assert all(counts.replays == 1 for counts in ours.decodes)


def test_two_ranks(llama: Any) -> None:
    """Parts of A and B; what ranks exchange is what they exchange anyway."""
    base, folders = llama
    expected = on_cpu(base, folders, ASKED, **SERVED)
    with StandInDevice() as device, two_ranks(base, device, (5,), **SERVED) as pair:
        runner, steps = pair
        install_all(runner, folders)
        ours = drive(runner, TEXTS, ASKED, 3, device=device)
    agree(ours, expected)
    assert all(counts.replays == 1 and not counts.launches for counts in ours.decodes)
    assert not any(counts.waits for counts in steps)


def test_latents_on_two_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Each rank has all of A and the rows of B of its heads."""
    base, modules = checkpoint("minicpm3", **SMALL), ["kv_b_proj", "o_proj"]
    folder = write_adapter(base, tmp_path / "a", r=4, target_modules=modules)
    asked = [{"adapter": i % 2} for i in range(len(TEXTS))]
    settings = SERVED | {"adapter_scope": ("latents",)}
    expected = on_cpu(base, [folder], asked, **settings)
    with StandInDevice() as device, two_ranks(base, device, (5,), **settings) as (runner, _):
        install_all(runner, [folder])
        agree(drive(runner, TEXTS, asked, 3, device=device), expected)


def test_loaded_and_dropped_while_others_decode(llama: Any) -> None:
    """A whole shard: a row that is preempted and comes back, a slot that another adapter takes."""
    base, folders = llama
    new = 8
    asked: list[dict[str, Any]] = [{"adapter": number} for number in (1, 0, 2, 3)]
    cpu = start(base, "cpu", **SERVED)
    install_all(cpu, folders)
    expected = drive(cpu, TEXTS[:4], asked, new).tokens

    def prefill(sequence: int, i: int, said: Sequence[int] = ()) -> PrefillRow:
        blocks = range(1 + 4 * sequence, 5 + 4 * sequence)
        prompt, length = [*TEXTS[i], *said], len(TEXTS[i])
        left = new - len(said)
        return row(sequence, prompt, left, blocks=blocks, prompt_length=length, seed=i, **asked[i])

    served = SERVED | {"max_loaded_adapters": 2}
    with device_shard(base, (2, 4), **served) as (router, shard):
        router.adapter(AdapterOrder(1, folders[0]))
        assert router.loaded(1).rank == 16
        router.prefill(prefill(0, 0), prefill(1, 1))
        router.until(lambda _: len(router.tokens(0)) >= 2)
        router.acknowledged(router.filter(0))
        said = router.tokens(0)
        router.adapter(AdapterOrder(2, folders[1]))  # takes its time, while the other one decodes
        assert not router.loaded(2).error
        router.prefill(prefill(2, 2), prefill(5, 0, said))
        router.finished(1, 2, 5)
        router.drop_adapter(2)
        router.adapter(AdapterOrder(3, folders[2]))
        assert not router.loaded(3).error
        router.prefill(prefill(3, 3), prefill(6, 2))
        router.finished(3, 6)
        told = [said + router.tokens(5), *(router.tokens(i) for i in (1, 2, 3))]
        assert told == expected and 2 <= len(said) < new
        assert "it has not been loaded" in (router.fault(6) or "")
        counts = shard.device.counts
        assert not counts.waits and counts.replays >= new and counts.stream_waits
    assert shard.error is None


def test_devices_without_our_kernels(llama: Any) -> None:
    """Those have torch's operations."""
    base, folders = llama
    expected = on_cpu(base, folders, ASKED, **SERVED)
    with StandInDevice("xpu:0") as device:
        runner = start(base, "xpu:0", **SERVED)
        install_all(runner, folders)
        agree(drive(runner, TEXTS, ASKED, 3), expected)
        assert "shrink_rows" not in device.counts.launches


def test_slots_that_do_not_fit(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base, _ = llama
    monkeypatch.setattr(stand_in_driver, "MEMORY", 1 << 20)
    with StandInDevice(), pytest.raises(ConfigurationError, match="lower --max-loaded-adapters"):
        start(base, "cuda:0", max_lora_rank=64, max_loaded_adapters=32)
