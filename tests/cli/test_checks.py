"""Values of commands' flags that cannot be: refused as the command line is read, by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tgi_trio.__main__ import EXIT_USAGE, main
from tgi_trio.cli.commands import COMMANDS, Command
from tgi_trio.cli.flags import Flag
from tgi_trio.cli.parser import UsageError, parse

RANK = "rank --leader a:1 --cluster-secret-file s"

REFUSED = {
    "bench --clients 8 --clients 0": "--clients must be >= 1. Given: 0",
    "bench --requests -3": "--requests must be >= 1. Given: -3",
    "bench --words 0": "--words must be >= 1. Given: 0",
    "bench --max-tokens 0": "--max-tokens must be >= 1. Given: 0",
    "bench --rate 0": "--rate must be > 0. Given: 0",
    "chat --max-tokens 0": "--max-tokens must be >= 1. Given: 0",
    "chat --temperature -0.5": "--temperature must be >= 0. Given: -0.5",
    "cluster --nodes-per-replica 0": "--nodes-per-replica must be >= 1. Given: 0",
    "cluster --replica-cpus -1": "--replica-cpus must be >= 0. Given: -1",
    "cluster --replica-gpus -1": "--replica-gpus must be >= 0. Given: -1",
    "doctor --port 65536": "--port must be 0 to 65535. Given: 65536",
    "doctor --port -1": "--port must be 0 to 65535. Given: -1",
    "front": "the front has no replica",
    "front --replica a:1 --port 65536": "--port must be 0 to 65535. Given: 65536",
    "front --replica a:1 --replica-timeout 0.1": "--replica-timeout must be >= 0.5. Given: 0.1",
    "front --replica a:1 --payload-limit 0": "--payload-limit must be >= 1. Given: 0",
    "front --replica a:1 --max-concurrent-requests 0": "--max-concurrent-requests must be >= 1",
    "front --replica a:1 --known-prefixes 0": "--known-prefixes must be >= 1. Given: 0",
    "front --replica a:1 --shutdown-delay -1": "--shutdown-delay must be >= 0. Given: -1",
    "front --replica a:1 -g -1": "--graceful-termination-timeout must be >= 0",
    "front --replica a:1 --peer b:1": "--peer needs --cluster-secret-file",
    "front --replica a:1 --peer-bind b:1": "--peer-bind needs --peer",
    "front --peer b:1 --cluster-secret-file s --bind unix:/x": "--peer needs --peer-bind host",
    "quantize a b --bits 3": "--bits must be 4. Given: 3",
    "batch a b --clients 0": "--clients must be >= 1. Given: 0",
    "batch a ./a": "OUTPUT must be another file than INPUT",
    "quantize a b --groupsize 12": "--groupsize must be -1 or a multiple of 8. Given: 12",
    "quantize a b --groupsize 0": "--groupsize must be -1 or a multiple of 8. Given: 0",
    "quantize a b --percdamp 7": "--percdamp: expected a number from 0 to 1, got '7'",
    "quantize a b --samples 0": "--samples must be >= 1. Given: 0",
    "quantize a b --sample-tokens 0": "--sample-tokens must be >= 1. Given: 0",
    "rank --rank 1": "--leader, --rank and --cluster-secret-file say whose rank runs here",
    f"{RANK}": "--leader, --rank and --cluster-secret-file say whose rank runs here",
    f"{RANK} --rank -1": "--rank must be >= 0. Given: -1",
    "rank --leader unix:/l --cluster-secret-file s --rank 1": "--leader must be host:port",
    "serve --port 65536": "`port` must be <= 65535. Given: 65536",
    "shard": "--cluster-secret-file says which routers",
    "shard --cluster-secret-file s --listen unix:/s": "--listen must be host:port",
}

ACCEPTED = (
    "bench --clients 1 --rate 0.5",
    "chat --temperature 0",
    "cluster --replica-cpus 0",
    "doctor --port 0",
    "front --replica a:1 --peer b:1 --cluster-secret-file s --replica-timeout 0.5",
    "quantize a b --groupsize -1 --percdamp 0",
    f"{RANK} --rank 0",
    "shard --cluster-secret-file s",
)


@pytest.mark.parametrize("words", REFUSED)
def test_values_that_cannot_be_are_refused_by_name(words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(REFUSED[words])):
        parse(words.split(), {})


@pytest.mark.parametrize("words", ACCEPTED)
def test_the_first_values_that_can_be_are_accepted(words: str) -> None:
    assert parse(words.split(), {}).command == words.split()[0]


@pytest.mark.parametrize("words", ["bench --requests 0", "quantize a b --bits 3", "front"])
def test_they_are_mistakes_of_usage(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == EXIT_USAGE
    assert capsys.readouterr().err == f"tgi-trio: {_told(words)}\n"


def _told(words: str) -> str:
    with pytest.raises(UsageError) as refused:
        parse(words.split(), {})
    return str(refused.value)


NEEDED = {
    "download-weights": "a",
    "quantize": "a b",
    "batch": "a b",
    "rank": "--leader a:1 --cluster-secret-file s --rank 1",
    "shard": "--cluster-secret-file s",
    "front": "--replica a:1",
}
NUMBERS = [
    pytest.param(command, flag, id=f"{command.name}-{flag.name}")
    for command in COMMANDS
    for flag in command.flags
    if flag.kind
    in ("int", "tokens", "bytes", "us", "seconds", "number", "share", "ratio", "factor")
]


@pytest.mark.parametrize(("command", "flag"), NUMBERS)
def test_far_below_zero_every_number_is_refused(command: Command, flag: Flag) -> None:
    words = NEEDED.get(command.name, "").replace(f"--{flag.name} 1", "").split()
    with pytest.raises(UsageError, match=f"--{flag.name}\\b|`{flag.field}`"):
        parse([command.name, *words, f"--{flag.name}=-1000000000"], {})


def test_a_loop_of_links_is_another_file_than_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(UsageError, match="OUTPUT must be another file"):
        parse(["batch", str(loop), str(loop)], {})
    assert main(["batch", str(loop), str(tmp_path / "out"), "--url", "http://127.0.0.1:1"]) == 1
    assert f"{loop} cannot be read: Too many levels of symbolic links" in capsys.readouterr().err
