"""torch's threads: one core each, and only they."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tgi_trio import demo
from tgi_trio.shard.machine.openmp import openmp_settings

# As the shard's main program does it; the affinities of all threads after a step of two.
LOAD = """
import json, os, sys
from contextlib import suppress
from pathlib import Path
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.shard.__main__ import load
from tgi_trio.ipc.startup import WarmupRequest

folder = Path(sys.argv[1])
settings = ShardSettings(
    model_path=folder,
    device="cpu",
    cpu_backend="torch",
    cpu_threads=2,
    tokenizer_file=folder / "tokenizer.json",
)
runner = load(settings)
runner.warm_up(WarmupRequest(64, 64, 4, 256))
threads = {}
for thread in map(int, os.listdir("/proc/self/task")):
    with suppress(ProcessLookupError):  # it has ended meanwhile
        threads[thread] = sorted(os.sched_getaffinity(thread))
grammar = runner.sampler.grammars._pool.submit(os.sched_getaffinity, 0).result()
print(json.dumps([threads[os.getpid()], sorted(threads.values()), sorted(grammar)]))
"""


def test_a_team_has_a_core_for_each_thread_and_its_helpers_have_them_all() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two threads need two cores")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    argv = [sys.executable, "-c", LOAD, str(demo.model_path())]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    main, every, grammar = json.loads(done.stdout)
    assert main == cores[:1]
    assert cores[1:2] in every
    assert grammar == cores


def test_each_thread_gets_one_place() -> None:
    found = openmp_settings(2, [4, 6], {"HOME": "/root"})
    assert found["OMP_PLACES"] == "{4},{6}" and found["OMP_PROC_BIND"] == "true"
    assert int(found["GOMP_SPINCOUNT"]) > 0


def test_a_single_thread_is_left_alone() -> None:
    assert openmp_settings(1, [0], {}) == {}


def test_more_threads_than_cores_are_not_bound() -> None:
    assert set(openmp_settings(4, [0, 1], {})) == {"OMP_NUM_THREADS", "GOMP_SPINCOUNT"}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"])
def test_somebodys_own_settings_stand(name: str) -> None:
    assert openmp_settings(2, [0, 1], {name: "1"}) == {}
