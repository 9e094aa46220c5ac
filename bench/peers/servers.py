"""The servers that `bench.serve.peers` compares: how each starts and is asked for whole answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.peers import llama_cpp, transformers_serve, vllm_auto_round, vllm_cpu, xllama_cpp
from bench.peers.environment import Unavailable

OURS: Final = "tgi-trio"


@dataclass(frozen=True)
class HttpPeer:
    """A server of OpenAI's /v1/completions."""

    name: str
    command: Callable[[int], list[str | Path]]  # port -> what to run
    whole: Mapping[str, Any] | None = None  # see tgi_trio.client.load.send_request
    environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""  # how it computes, where that is not as stored


@dataclass(frozen=True)
class Job:
    """What a server is started for."""

    home: Path  # of the peers' environments
    checkpoint: Path
    clients: int
    max_tokens: int
    quantised: bool = False  # whether its weights are codes of 4 bits


def ours(job: Job) -> HttpPeer:
    argv = sys.executable, "-m", "tgi_trio", "--model-id", str(job.checkpoint)
    place = "--hostname", "127.0.0.1", "--port"
    note = "activations of 8 bits, 32 of them to a scale" if job.quantised else ""
    return HttpPeer(OURS, lambda port: [*argv, *place, str(port)], note=note)


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


_USAGE: Final = {"ignore_eos": True, "stream_options": {"include_usage": True}}
_BLOCKS: Final = "GPTQ's and AWQ's codes are in a GGUF file as Q4_0, the same weights"


def llama_server(job: Job) -> HttpPeer:
    return _llama("llama.cpp server", llama_cpp.LlamaCpp(job.home), job)


def xllamacpp_server(job: Job) -> HttpPeer:
    peer = xllama_cpp.Xllamacpp(job.home)
    return _llama("llama.cpp server of xllamacpp", peer, job, "built for AVX2")


def _llama(
    name: str, peer: llama_cpp.LlamaCpp | xllama_cpp.Xllamacpp, job: Job, built: str = ""
) -> HttpPeer:
    notes = [built] * bool(built) + [_BLOCKS] * job.quantised
    return HttpPeer(
        name,
        lambda port: peer.serve_command(job.checkpoint, port, job.clients),
        _USAGE | {"cache_prompt": False},
        note="; ".join(notes),
    )


def vllm_serve(job: Job) -> HttpPeer:
    peer = vllm_cpu.VllmCpu(job.home)
    if job.quantised:
        peer.check_four_bits()
    return HttpPeer(
        "vllm-cpu serve",
        lambda port: peer.serve_command(job.checkpoint, port, job.clients),
        _USAGE,
        vllm_cpu.SETTINGS,
    )


def vllm_auto_round_serve(job: Job) -> HttpPeer:
    return _vllm_auto_round("vllm-cpu serve, auto-round's kernels", job, {})


def vllm_auto_round_apart(job: Job) -> HttpPeer:
    """A core is left to what does not compute, as vLLM advises."""
    apart = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
    return _vllm_auto_round("the same, one core not for computing", job, apart)


def _vllm_auto_round(name: str, job: Job, settings: Mapping[str, str]) -> HttpPeer:
    if not job.quantised:
        raise Unavailable("auto-round's kernels are for 4 bits, see --quantised")
    peer = vllm_auto_round.VllmAutoRound(job.home)
    checkpoint = vllm_auto_round.as_auto_round(job.checkpoint)
    return HttpPeer(
        name,
        lambda port: peer.serve_command(checkpoint, port, job.clients),
        _USAGE,
        {**vllm_cpu.SETTINGS, **settings},
        "config.json says auto-round, tensors are the same; products in float32",
    )


# What a peer is called on the command line; each raises Unavailable where it cannot be had.
SERVERS: Final[dict[str, Callable[[Job], HttpPeer]]] = {
    "transformers": transformers_default,
    "transformers-batching": transformers_batching,
    "llama.cpp": llama_server,
    "xllamacpp": xllamacpp_server,
    "vllm-cpu": vllm_serve,
    "vllm-cpu-auto-round": vllm_auto_round_serve,
    "vllm-cpu-auto-round-apart": vllm_auto_round_apart,
}
