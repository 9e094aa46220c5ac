"""Flags and variables of text-generation-inference that have no effect here.

None is silently ignored: some end the start with a reason, the others are named in the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class RefusedFlag:
    """A flag of TGI that is an error, unless its value asks for what happens anyway."""

    name: str
    why: str
    same: tuple[Any, ...] = ()  # accepted values, as they change nothing here
    kind: str = "text"  # a key of `KINDS`
    short: str = ""
    env: bool = True  # False: other programs use the variable too, so it is only named in the log


@dataclass(frozen=True, slots=True)
class Idle:
    """A flag or variable without effect; the log says so."""

    name: str  # of the flag, in kebab-case; the variable has the same name in UPPER_SNAKE
    why: str
    kind: str = "text"  # a key of `KINDS`
    flag: bool = True  # False: there is only a variable


_OWN_KERNELS: Final = (
    "kernels are chosen by device, dtype and model: on a CPU --cpu-backend chooses"
)
_NO_NGROK: Final = "there is no ngrok tunnel: run ngrok beside the server"
_SHARED_MEMORY: Final = "shards of this machine talk over shared memory: there is nothing to set"
_RANKS: Final = "ranks of this machine need no address; those of others come to --rank-address"

REFUSED: Final[tuple[RefusedFlag, ...]] = (
    RefusedFlag("disable-custom-kernels", _OWN_KERNELS, same=(False,), kind="switch"),
    RefusedFlag("weights-cache-override", "give the folder of the weights to --model-id"),
    RefusedFlag("shard-uds-path", _SHARED_MEMORY),
    RefusedFlag("master-shard-uds-path", _SHARED_MEMORY),
    RefusedFlag("uds-path", _SHARED_MEMORY, env=False),
    RefusedFlag("master-addr", _RANKS, env=False),
    RefusedFlag("master-port", _RANKS, env=False),
    RefusedFlag("ngrok", _NO_NGROK, same=(False,), kind="switch"),
    RefusedFlag("ngrok-authtoken", _NO_NGROK, env=False),
    RefusedFlag("ngrok-edge", _NO_NGROK, env=False),
)

_OWN_ATTENTION: Final = "attention is chosen by device, dtype and model"
_PROMPT_LOGPROBS: Final = "any request may ask for them with decoder_input_details"

IDLE: Final[tuple[Idle, ...]] = (
    Idle("messages-api-enabled", "the messages API is always served", kind="switch"),
    Idle("enable-prefill-logprobs", _PROMPT_LOGPROBS, kind="switch"),
    Idle("usage-stats", "nothing is ever sent anywhere", kind="usage-stats"),
    Idle("request-logprobs", _PROMPT_LOGPROBS, flag=False),
    Idle("attention", _OWN_ATTENTION, flag=False),
    Idle("use-flash-attention", _OWN_ATTENTION, flag=False),
    Idle("prefill-chunking", "prompts always come in chunks: see --step-token-budget", flag=False),
    Idle(
        "tgi-wiggle-room",
        "a warm-up step measures what memory is left: see --cuda-memory-fraction",
        flag=False,
    ),
    Idle("xpu-memory-fraction", "--cuda-memory-fraction is for devices of every kind", flag=False),
    Idle(
        "use-cutlass-w8a8", "kernels are chosen by device and format: see --activations", flag=False
    ),
    Idle("hf-kernels-cache", "all kernels are part of the package", flag=False),
    Idle("log-format", "--json-output gives JSON", flag=False),
    Idle("log-colorize", "log lines have no colours", flag=False),
)
