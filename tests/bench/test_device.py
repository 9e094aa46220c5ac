"""What the device benchmark counts, and that all of it runs without a device."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.device import server
from bench.device.__main__ import command, parse
from bench.device.alternatives import ALTERNATIVES, try_one
from bench.device.choices import CHOICES, leave_out
from bench.device.models import config_of, make_runner, values_of
from bench.device.parts import TILED, Part, Row, choose_parts, read_rows, run_parts
from bench.device.random_server import write_folder
from bench.device.recurring import Recurring, find_recurring
from bench.device.roofline import Ceiling, Size, Work
from bench.device.server import went_on
from bench.device.shapes import SHAPES
from bench.device.state_shapes import STATES
from bench.device.steps import Bench, Plan
from bench.device.streams import Heard, read_until, readers
from bench.device.timed_steps import Step, describe
from bench.device.warm_up import timed_warm_up
from tgi_trio.client.address import Address
from tgi_trio.client.measures import RequestRecord
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.check import check_checkpoint, model_spec
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.decoder import LayerSpec
from tgi_trio.shard.torch_backend.torch_device import has_triton
from tgi_trio.testing.stand_in_device import StandInDevice

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_a_decode_moves_every_weight_once_and_what_is_cached() -> None:
    size, runner = Size.of(config_of("dry")), make_runner("dry", CPU, torch.float32, ())
    per_token = runner.info.kv_bytes_per_token
    alone = size.step(1, 1, 0, 4).moved
    hidden = config_of("dry").need("hidden_size")
    norms = 4 * 2 * len(size.layers) * hidden  # vectors do not count
    assert alone - per_token == runner.model.nbytes() - norms
    assert size.step(3, 1, 100, 4).moved - alone == pytest.approx((3 * 101 - 1) * per_token)


def test_a_prefill_multiplies_every_weight_by_every_token() -> None:
    size, heads = Size.of(config_of("8B")), config_of("8B").need("num_attention_heads")
    layers = sum(layer.dense for layer in size.layers)
    seen = 4 * len(size.layers) * heads * 128 * sum(range(1, 101))  # causal
    assert size.step(1, 100, 100, 2).operations == pytest.approx(
        2 * (100 * layers + size.head) + seen
    )
    assert 7.5e9 < layers + size.head < 8e9


def test_a_mixture_moves_the_experts_that_are_used() -> None:
    size = Size.of(config_of("mixture"))
    layer = size.layers[0]
    assert layer.expected_experts(1) == pytest.approx(8)
    assert 8 * 1.9 < layer.expected_experts(2) < 16
    assert layer.expected_experts(4096) == pytest.approx(128)
    assert layer.expert == 3 * 2048 * 768 and layer.router == 2048 * 128
    assert size.step(1, 1, 0, 2).operations < size.step(1, 1, 0, 2).moved * 2


@pytest.mark.parametrize(
    ("shape", "short", "long"),
    (
        # Latents of 576 numbers, of at most 2048 tokens, and index keys of 128 of all of them.
        ("tokens", 1000 * (576 + 128), 2048 * 576 + 100_000 * 128),
        # K and V of four heads, of at most 16 blocks of 128 tokens, and index keys.
        ("blocks", 1000 * (1024 + 128), 2048 * 1024 + 100_000 * 128),
    ),
)
def test_attention_reads_what_an_index_chooses_and_all_of_its_keys(
    shape: str, short: int, long: int
) -> None:
    size = Size.of(config_of(shape))
    for context, read in ((1000, short), (100_000, long)):
        more = size.step(1, 1, context, 2).moved - size.step(1, 1, 0, 2).moved
        assert more == pytest.approx(2 * len(size.layers) * read)


def test_entries_are_read_beside_a_window() -> None:
    """Each of the first layer's is of four tokens, and an index selects 512; then of 128."""
    size = Size.of(config_of("entries"))
    for context, entries in ((1000, (250, 7.8125)), (100_000, (512, 781.25))):
        more = size.step(1, 1, context, 2).moved - size.step(1, 1, 0, 2).moved
        index = context / 4 * 128
        assert more == pytest.approx(2 * (2 * 128 * 512 + sum(entries) * 512 + index))


def test_states_are_read_and_written_once_whatever_the_context_is() -> None:
    """And moved by every token: Mamba-2's 128 heads of 64 x 128, and the inputs of four taps."""
    size, config = Size.of(config_of("mamba2")), config_of("mamba2")
    layers, channels = config.need("num_hidden_layers"), 128 * 64 + 2 * 8 * 128
    one = size.step(1, 1, 0, 2)
    assert size.step(1, 1, 10_000, 2) == one
    more = size.step(2, 1, 0, 2)
    assert more.moved - one.moved == layers * 2 * (4 * 128 * 64 * 128 + 2 * 3 * channels)
    prompt = size.step(1, 101, 101, 2)
    assert prompt.moved == one.moved
    weights = sum(layer.dense for layer in size.layers)
    each = 2 * weights + layers * (5 * 128 * 64 * 128 + 2 * 4 * channels)
    assert prompt.operations - one.operations == pytest.approx(100 * each)


def test_a_recurrent_gate_has_matrices_of_its_own() -> None:
    gates = Size.of(config_of("gates")).layers[0].recurring
    assert (gates.wide, gates.gates) == (2560, 2 * 10 * 256 * 256)
    assert find_recurring(decoder_layer("1B")) == Recurring()


def decoder_layer(shape: str) -> LayerSpec:
    spec = decoder_spec(config_of(shape))
    assert spec is not None
    return spec.layers[0]


@pytest.mark.parametrize("shape", ALTERNATIVES)
def test_each_alternative_takes_the_place_of_what_is_there(shape: str) -> None:
    assert {shape, f"dry {shape}"} <= SHAPES.keys() and shape in TILED
    for patches in ALTERNATIVES[shape].values():
        for name, instead in patches.items():
            place, _, own = name.rpartition(".")
            built_in = getattr(
                importlib.import_module(f"tgi_trio.shard.torch_backend.{place}"), own
            )
            assert built_in is not instead and callable(built_in) == callable(instead)
            if callable(instead):
                made: Any = instead(128, torch.bfloat16)
                assert all(type(number) in (int, str) for number in made)


def test_an_alternative_that_is_wrong_or_refused_says_so() -> None:
    known = {"output": torch.ones(4)}

    def refuse() -> dict[str, torch.Tensor]:
        raise RuntimeError("out of resource: shared memory")

    nothing = {"output": torch.full((4,), torch.nan)}
    runs = {
        "right": lambda: {"output": torch.ones(4)},
        "nothing": lambda: nothing,
        "wrong": lambda: {"output": torch.ones(4) * 2},
        "big": refuse,
    }
    found = {name: try_one(run, known, lambda _: 0.5, 1.0) for name, run in runs.items()}
    assert found["right"] == {"step_ms": 500.0, "error": 0.0, "over_built_in": 0.5}
    assert found["nothing"]["left_out"] == "off by nan"
    assert found["wrong"] == {"left_out": "off by 1.000", "error": 1.0}
    assert found["big"] == {"left_out": "RuntimeError: out of resource: shared memory"}


def test_the_slower_of_memory_and_matrices_sets_the_pace() -> None:
    ceiling = Ceiling(bytes_per_second=10.0, operations_per_second=100.0)
    assert ceiling.seconds(Work(moved=20, operations=100)) == 2.0
    assert ceiling.seconds(Work(moved=20, operations=500)) == 5.0


@pytest.mark.parametrize("shape", ["tiny", "8B"])
def test_a_server_finds_all_weights_of_a_shape_that_has_none(tmp_path: Path, shape: str) -> None:
    folder = write_folder(shape, tmp_path)
    config = read_config(folder)
    check_checkpoint(config, model_spec(config))
    assert config.get("hidden_size") == values_of(shape)["hidden_size"]
    assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) < 64 << 20


def test_rows_have_tokens_of_their_own_behind_a_context_that_is_there() -> None:
    plan = Plan((3,), context=40, prompt=8, steps=1, graphs=())
    bench = Bench.start("dry", CPU, torch.float32, plan)
    rows = bench._batch(3, plan.context, 2).rows
    tokens = np.stack([row.token_ids[: row.length] for row in rows])
    assert len(np.unique(tokens, axis=0)) == 3 and len(np.unique(tokens)) > 20
    blocks = {block for row in rows for block in row.block_ids}
    cache = bench.runner._cache
    assert cache is not None
    for memory in (*cache.key_blocks, *cache.value_blocks):
        assert all(memory[block].std() > 0.5 for block in blocks)


def test_the_most_wanted_parts_come_first() -> None:
    parts = choose_parts(["8B", "1B"], ["plain", "fp8"], adapters=True, server="8B", peers=["vllm"])
    assert [part.name for part in parts] == [
        *("8B", "1B", "server 8B", "broken device 8B"),
        *("8B fp8", "1B fp8", "8B batch invariant", "1B adapters"),
        *("1B without few rows", "1B without heads in products"),
        *("1B without looking up at once", "1B without measured shares"),
        *("1B without measured carve-outs", "1B without the last norm in a product"),
        *("1B without early choices", "vllm"),
    ]


@pytest.mark.parametrize("choice", CHOICES)
def test_each_choice_can_be_left_out_by_its_name(choice: str) -> None:
    place, _, name = CHOICES[choice][0].rpartition(".")
    module = importlib.import_module(f"tgi_trio.shard.torch_backend.{place}")
    made = getattr(module, name)
    with leave_out(choice):
        assert getattr(module, name) is CHOICES[choice][1]
    assert getattr(module, name) is made
    assert f"'1B without {choice}'" in (ROOT / "bench/device/kit.sh").read_text()


def test_a_part_that_fails_or_hangs_costs_no_other(tmp_path: Path) -> None:
    row = json.dumps({"shape": "8B", "what": "decode", "step_ms": 1.0})
    found = f"from pathlib import Path; Path({str(tmp_path / 'rows')!r}).open('a').write({row!r}"
    codes = {
        "cut off": f"{found} + '\\n{{'); raise SystemExit('CUDA error: it is gone')",
        "hangs": "import time; time.sleep(60)",
        "fine": f"{found} + '\\n')",
        "late": "",
    }
    parts = [Part(name, "steps", "8B", 1.0 if name == "hangs" else 240.0) for name in codes]
    told: list[list[Row]] = []
    argv = [sys.executable, "-c"]
    run_parts(
        parts[:3],
        lambda p: [*argv, codes[p.name]],
        tmp_path / "rows",
        240.0,
        told.append,
        least=0.5,
    )
    run_parts(parts[3:], lambda p: [*argv, codes[p.name]], tmp_path / "rows", 0.0, told.append)
    assert len(told) == 4 and told[-1] == read_rows(tmp_path / "rows")
    whys = {row["shape"]: row["why"] for row in told[-1] if "why" in row}
    assert whys == {
        "cut off": "exit 1: CUDA error: it is gone",
        "hangs": "not done within 1 s",
        "late": "not begun, the time was up",
    }
    assert sum("step_ms" in row for row in told[0]) == 1  # what it had found is kept
    assert sum("step_ms" in row for row in told[-1]) == 2


def test_a_part_is_told_to_its_process(tmp_path: Path) -> None:
    part = choose_parts(["8B"], ["plain"], adapters=False, server="", peers=[])[0]
    argv = command(["--steps", "4", "--budget", "60"], part, tmp_path / "rows")
    assert argv[:3] == [sys.executable, "-m", "bench.device"]
    args = parse(argv[3:])
    assert Part(**json.loads(args.part)) == part
    assert (args.rows, args.steps) == (tmp_path / "rows", 4)


def test_tokens_count_while_all_streams_run() -> None:
    first = RequestRecord(0.0, [1.0, 2.0, 3.0, 4.0])
    second = RequestRecord(0.0, [1.5, 2.75, 3.25, 9.0])
    heard = Heard([first, second], 0.0, 9.0, [])
    assert heard.window() == (1.5, 4.0)
    assert sorted(heard.gaps(*heard.window())) == [0.5, 1.0, 1.0, 1.25]


def test_streams_are_read_again_that_did_not_run_at_once() -> None:
    """On a busy machine one was at its end before the other began, and the kit had failed."""
    apart = Heard([RequestRecord(0.0, [1.0, 2.0]), RequestRecord(0.0, [3.0, 4.0])], 0.0, 4.0, [])
    both = Heard([RequestRecord(0.0, [1.0, 2.0]), RequestRecord(0.0, [1.0, 2.0])], 0.0, 2.0, [])
    found = iter([apart, apart, both, apart])
    assert read_until(lambda: next(found), Heard.ran_at_once) is both
    found = iter([apart] * 5)
    assert read_until(lambda: next(found), Heard.ran_at_once) is apart
    assert next(found, None) is None


def test_a_break_is_seen_again_that_a_reader_came_too_late_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And one by which a stream lost tokens is not."""
    seen, late = {"completed": 8, "interrupted": 8, "missed": 0}, {"completed": 8, "missed": 1}
    lost, whole = {"completed": 7, "missed": 1}, {"completed": 8, "why": "it was not broken"}
    for turns in ([seen], [late, late, seen], [late, lost], [whole], [late] * 5):
        left = iter(turns)
        monkeypatch.setattr(server, "_break_once", lambda *_, left=left: next(left))
        assert server.measure_break("dry", Path(), 9, []) is turns[-1]
        assert next(left, None) is None


def test_each_reader_is_a_process_of_its_own() -> None:
    """One that had started first read the streams of another, one after the other."""
    with readers(Address("127.0.0.1", 1), 6) as own:
        heard = own.read(1, 1)
        assert len(multiprocessing.active_children()) == 4 == len(heard.shares)
    assert [bool(record.error) for record in heard.records] == [True] * 6  # nobody answers there


def test_a_stream_goes_on_where_its_longest_pause_ends() -> None:
    events = [1.0, 1.1, 1.2, 1.3, 9.0, 9.1]
    assert went_on(events, 1.25) == 9.0  # a token was on its way
    assert went_on([1.0, 1.1, 1.2, 1.3], 1.15) == 1.3  # nobody would call that a pause
    assert went_on(events, 0.5) is None and went_on(events, 9.5) is None
    assert went_on([], 1.0) is None


def test_steps_that_decode_all_rows_and_nothing_else_are_steady() -> None:
    def step(number: int, rows: int, prompt: int = 0) -> Step:
        read, ms = number * 7_000_000, 1_000_000
        launched = read - 13 * ms  # a millisecond behind what was read two steps ago
        times = (launched, launched + ms // 2, read - 5 * ms, read)
        return Step(rows, prompt, *times, 6 * ms, 2_000, read, read // 2)

    steps = [step(i, 4) for i in range(1, 6)] + [step(6, 4, 32), step(7, 4), step(8, 3)]
    found = describe(np.array(steps, np.int64), 0.0, 1.0, 4)
    assert (found["steps"], found["steady_steps"], found["with_prompts"]) == (8, 3, 1 / 8)
    assert (found["period_ms"], found["forward_ms"], found["idle_us"]) == (7.0, 6.0, 2.0)
    assert (found["launch_us"], found["waited_us"], found["turn_us"]) == (500.0, 5000.0, 1000.0)
    assert (found["ahead"], found["processor_share"], found["own_share"]) == (1.0, 1.0, 0.5)


@pytest.mark.thorough
@pytest.mark.system
@pytest.mark.timeout(1500)
def test_the_kit_runs_without_a_device(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    env = os.environ | {"KIT_DRY": "1", "OUT": str(tmp_path / "out"), "PYTHON": sys.executable}
    env["TMPDIR"] = str(tmp_path)  # models of its own: another run may be writing the others
    kit = ["bash", str(ROOT / "bench/device/kit.sh"), "plain", "more", "chosen", "states"]
    done = subprocess.run(kit, capture_output=True, text=True, timeout=1500, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    told: set[str] = set()
    out, rows = tmp_path / "out", list[Row]()
    for name in ("plain", "more", "chosen", "states"):
        found = json.loads((out / f"{name}.json").read_text())
        assert (found["schema"], found["bench"]) == (2, "device") and found["gb_per_s"] > 0
        assert not any("why" in row for row in found["results"]) and "machine" in found
        rows += found["results"]
        told |= {row["what"].split()[0] for row in found["results"]}
    assert told == {"warm-up", "decode", "prefill", "load", "server,", "a", "1", "2", "3"}
    assert any(row["what"].endswith(", 2 adapters") for row in rows)
    assert {"dry tokens", "dry blocks", "dry entries"} < {row["shape"] for row in rows}
    assert {f"dry {shape}" for shape in STATES} < {row["shape"] for row in rows}
    tiles = [row for row in rows if row["shape"].endswith("tiles")]
    assert all(row["error"] < 1e-4 and "left_out" not in row for row in tiles)
    every = {words for each in ALTERNATIVES.values() for words in each}
    assert every == {row["what"].partition(", ")[2] for row in tiles} - {"built in"}
    (broken,) = [
        row
        for row in json.loads((out / "plain.json").read_text())["results"]
        if row["what"].startswith("a device that breaks")
    ]
    assert broken["broken"] and broken["completed"] == broken["streams"] and not broken["errors"]
    assert "dry" in SHAPES and len(list(out.iterdir())) <= 10 and (out / "traces.tar").exists()


@pytest.mark.skipif(not has_triton(), reason="recordings choose tokens by Triton's kernels")
def test_a_warm_up_counts_the_recordings_of_decodes_and_of_prompts() -> None:
    with StandInDevice() as device:
        runner = make_runner("dry", torch.device("cuda:0"), torch.float32, (1, 2))
        with timed_warm_up() as found, device.idle():
            runner.warm_up(WarmupRequest(64, 64, 2, 1024))
        made = device.counts.recordings
    graphs = runner._graphs
    assert graphs is not None
    # Each size alone and with masks; of those with prompts some are forgotten again.
    assert 4 < found["recordings"] <= made
    assert 0.0 < found["recordings_s"] < found["warm_up_s"]
