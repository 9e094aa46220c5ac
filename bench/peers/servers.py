"""The servers that `bench.serve.peers` compares: how each starts and is asked for whole answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.peers import llama_cpp, transformers_serve, vllm_cpu

OURS: Final = "tgi-trio"


@dataclass(frozen=True)
class HttpPeer:
    """A server of OpenAI's /v1/completions."""

    name: str
    command: Callable[[int], list[str | Path]]  # port -> what to run
    whole: Mapping[str, Any] | None = None  # see tgi_trio.client.load.one_request
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What a server is started for."""

    home: Path  # of the peers' environments
    checkpoint: Path
    clients: int
    max_tokens: int


def ours(job: Job) -> HttpPeer:
    argv = sys.executable, "-m", "tgi_trio", "--model-id", str(job.checkpoint)
    place = "--hostname", "127.0.0.1", "--port"
    return HttpPeer(OURS, lambda port: [*argv, *place, str(port)])


def transformers_default(job: Job) -> HttpPeer:
    """One request after the other."""
    return _transformers("transformers serve", job)


def transformers_batching(job: Job) -> HttpPeer:
    return _transformers("transformers serve --continuous-batching", job, "--continuous-batching")


def _transformers(name: str, job: Job, *flags: str) -> HttpPeer:
    peer = transformers_serve.TransformersServe(job.home)
    # A generation config of its own has no end-of-sequence token, so nothing ends an answer early.
    whole = {"max_new_tokens": job.max_tokens, "do_sample": False}
    return HttpPeer(
        name,
        lambda port: peer.serve_command(job.checkpoint, port, *flags),
        {"generation_config": json.dumps(whole)},
    )


def llama_server(job: Job) -> HttpPeer:
    peer = llama_cpp.LlamaCpp(job.home)
    whole = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    return HttpPeer(
        "llama.cpp server",
        lambda port: peer.serve_command(job.checkpoint, port, job.clients),
        whole | {"cache_prompt": False},
    )


def vllm_serve(job: Job) -> HttpPeer:
    peer = vllm_cpu.VllmCpu(job.home)
    whole = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    return HttpPeer(
        "vllm-cpu serve",
        lambda port: peer.serve_command(job.checkpoint, port, job.clients),
        whole,
        vllm_cpu.SETTINGS,
    )


# What a peer is called on the command line; each raises Unavailable where it cannot be had.
SERVERS: Final[dict[str, Callable[[Job], HttpPeer]]] = {
    "transformers": transformers_default,
    "transformers-batching": transformers_batching,
    "llama.cpp": llama_server,
    "vllm-cpu": vllm_serve,
}
