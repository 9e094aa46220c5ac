"""A server over several machines: who runs which ranks, with which devices."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tgi_trio.cli.cluster import find_division
from tgi_trio.cli.options import ClusterOptions, RankOptions
from tgi_trio.cli.parser import parse
from tgi_trio.cluster import rank_processes
from tgi_trio.cluster.divided import Divided, share_devices
from tgi_trio.cluster.rank_processes import run_ranks
from tgi_trio.errors import ConfigurationError


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (2, 4), (3, 12)])
def test_every_rank_runs_in_one_part(nodes: int, ranks: int) -> None:
    divided = Divided(nodes, ranks, ("--cluster-secret-file", "s"))
    served = parse(["serve", *divided.leader_words("10.0.0.1:7")], {}).options
    assert (served.num_shard, served.rank_address) == (ranks, "10.0.0.1:7")
    elsewhere = [
        parse(words, {}).options.rank
        for part in range(1, nodes)
        for words in divided.commands(part, "10.0.0.1:7")
    ]
    assert elsewhere == list(range(ranks - served.remote_ranks, ranks))
    assert ranks - served.remote_ranks == divided.share


def test_a_division_is_read_from_flags() -> None:
    words = ["--model-id", "a/b", "--cluster-secret-file", "s", "--trust-remote-code"]
    more = ["--logger-level", "debug", "--json-output", "--revision", "r", "--max-input-tokens=9"]
    options = ClusterOptions(nodes_per_replica=2, replica_gpus=4, server=(*words, *more))
    divided = find_division(options)
    assert divided is not None and (divided.nodes, divided.ranks) == (2, 2)
    (command,) = divided.commands(1, "h:1")
    assert parse(command, {}).options == RankOptions(
        leader="h:1",
        rank=1,
        cluster_secret_file=Path("s"),
        model_id="a/b",
        revision="r",
        trust_remote_code=True,
        json_output=True,
        logger_level="debug",
    )
    assert find_division(ClusterOptions(server=("--num-shard", "3"))) is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ClusterOptions(nodes_per_replica=2, server=("--num-shard", "3")),
            "--num-shard must be a multiple of --nodes-per-replica 2: 3",
        ),
        (
            ClusterOptions(nodes_per_replica=2, replica_gpus=3),
            "--replica-gpus must be a multiple of --nodes-per-replica 2: 3",
        ),
        (ClusterOptions(nodes_per_replica=2), "needs --cluster-secret-file"),
    ],
)
def test_what_cannot_be_divided_is_said(options: ClusterOptions, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        find_division(options)


def test_devices_are_shared_out() -> None:
    assert share_devices("0,1,2,3", 2) == ["0,1", "2,3"]
    assert share_devices("GPU-a,GPU-b", 2) == ["GPU-a", "GPU-b"]
    assert share_devices("0,1,2", 2) == ["0,1,2"] * 2


def test_ranks_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\necho "$5 $CUDA_VISIBLE_DEVICES $$" > {tmp_path}/new-$5\n'
        f"mv {tmp_path}/new-$5 {tmp_path}/rank-$5\nexec sleep 60\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(rank_processes, "LOOK_S", 0.01)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    ranks = run_ranks([["rank", "2"], ["rank", "3"]])
    next(ranks)
    files = [tmp_path / "rank-2", tmp_path / "rank-3"]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    words = [file.read_text().split() for file in files]
    assert [each[:2] for each in words] == [["2", "4"], ["3", "6"]]
    os.kill(int(words[1][2]), signal.SIGKILL)
    assert list(ranks) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(words[0][2]), 0)
