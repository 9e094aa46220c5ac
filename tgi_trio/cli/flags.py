"""Every flag as one row of one table, and every flag of other builds that is refused.

A row's name, with underscores, is the field of `settings.Options` that it sets; the default is
that field's default. The environment variable has the same name in UPPER_SNAKE. A flag wins over
its variable; an empty variable counts as not set. Flags of other commands than `serve` are rows of
`cli.commands`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from tgi_trio.settings import CPU_BACKENDS, DTYPES, QUANTIZATIONS, Options


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of `FLAGS`, or of another command's."""

    name: str  # kebab-case
    kind: str  # a key of `KINDS`
    help: str  # one line
    unset: str = ""  # what happens when the default is None
    owner: type[Any] = Options  # the dataclass that has the field
    variable: bool = True  # whether the environment may set it
    short: str = ""  # e.g. "-p"
    many: bool = False  # may be given several times; commas separate in the environment

    @property
    def field(self) -> str:
        """Name in `owner`."""
        return self.name.replace("-", "_")

    @property
    def env(self) -> str:
        """Name of the environment variable; empty when there is none."""
        return self.field.upper() if self.variable else ""

    @property
    def default(self) -> Any:
        return next(f.default for f in fields(self.owner) if f.name == self.field)

    def parse(self, text: str) -> Any:
        """Return the value of one occurrence. Raises ValueError with what is allowed."""
        return KINDS[self.kind][1](text.strip())


def _bool(text: str) -> bool:
    word = text.lower()
    if word in ("true", "1", "yes", "y", "on", "t"):
        return True
    if word in ("false", "0", "no", "n", "off", "f"):
        return False
    raise ValueError("expected true or false")


def _int(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise ValueError("expected a whole number")
    return int(text)


def _float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise ValueError("expected a number")
    return value


def _key(text: str) -> str:
    if not text:
        raise ValueError("expected a key")
    return text


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    named = bool(host) and (":" not in host or (host[0] == "[" and host[-1] == "]"))
    is_port = port.isascii() and port.isdecimal() and int(port) <= 65535
    if text == "unix:" or not (text.startswith("unix:") or (named and is_port)):
        raise ValueError("expected host:port, [host]:port or unix:/path")
    return text


def _url(text: str) -> str:
    from tgi_trio.client.address import parse_address  # brings trio, which --help does not need

    parse_address(text)
    return text


def _route(text: str) -> str:
    if not re.fullmatch(r"/[!-~]*", text) or re.search("[<>?#]", text):
        raise ValueError("expected a path such as /predict")
    return text


def _collector(text: str) -> str:
    if not re.fullmatch(r"https?://[^/\s]+:[0-9]+/?", text):
        raise ValueError("expected http://host:port, or https:")
    return text


def _cpu_backend(text: str) -> str:
    if text not in CPU_BACKENDS:
        raise ValueError(f"expected one of {', '.join(CPU_BACKENDS)}")
    return text


def _quantization(text: str) -> str:
    if text not in QUANTIZATIONS:
        raise ValueError(
            f"expected {', '.join(QUANTIZATIONS)}, which makes 8-bit weights of an ordinary "
            "checkpoint on a CPU; no other quantised weights are served"
        )
    return text


def _sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if parts == ["0"]:
        return ()
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError("expected sizes such as 1,2,4,8, or 0 for none")
    return tuple(int(part) for part in parts)


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise ValueError(f"expected one of {', '.join(DTYPES)}")
    return text


# kind -> (placeholder in --help, parser)
KINDS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "switch": ("", _bool),  # given or not; true or false in the environment
    "bool": ("BOOL", _bool),
    "int": ("N", _int),
    "tokens": ("TOKENS", _int),
    "bytes": ("BYTES", _int),
    "us": ("US", _int),
    "seconds": ("SECONDS", _float),
    "ratio": ("RATIO", _float),
    "text": ("TEXT", str),
    "path": ("PATH", Path),
    "dtype": ("DTYPE", _dtype),
    "quantization": ("FORMAT", _quantization),
    "backend": ("BACKEND", _cpu_backend),
    "sizes": ("SIZES", _sizes),
    "ip": ("IP", str),
    "key": ("KEY", _key),
    "url": ("URL", _url),
    "address": ("ADDRESS", _address),
    "route": ("PATH", _route),
    "collector": ("URL", _collector),
}

# (group, rows) in the order of --help
FLAGS: Final[tuple[tuple[str, tuple[Flag, ...]], ...]] = (
    (
        "Model",
        (
            Flag("model-id", "text", "hub repository or local folder", "the embedded model"),
            Flag("revision", "text", "branch, commit or refs/pr/N of a hub repository", "main"),
            Flag("dtype", "dtype", f"compute in {', '.join(DTYPES)}", "the checkpoint's"),
            Flag(
                "quantize",
                "quantization",
                "eetq: 8-bit weights, on a CPU",
                "the weights as they are",
            ),
            Flag("cpu-backend", "backend", f"one of {', '.join(CPU_BACKENDS)}; see docs"),
            Flag("cpu-threads", "int", "threads of a CPU shard", "by the model's size"),
            Flag(
                "cuda-graphs",
                "sizes",
                "batch sizes recorded as CUDA graphs; 0 for none",
                "1,2,4,8,16,32 where there is a CUDA device",
            ),
            Flag("cuda-memory-fraction", "ratio", "part of each CUDA device's memory to use"),
            Flag("trust-remote-code", "switch", "run code that comes with the model"),
            Flag("huggingface-hub-cache", "path", "folder of downloads", "huggingface_hub's"),
            Flag("tokenizer-config-path", "path", "another tokenizer_config.json", "the model's"),
            Flag("chat-template", "text", "path of a Jinja template, or itself", "the model's"),
            Flag("served-model-name", "text", "name in the API; repeatable", "model-id", many=True),
            Flag("sharded", "bool", "split the model over several ranks", "false"),
            Flag("num-shard", "int", "number of ranks", "1"),
        ),
    ),
    (
        "Limits of a request",
        (
            Flag("max-input-tokens", "tokens", "longest prompt", "max-total-tokens - 1"),
            Flag("max-input-length", "tokens", "older name of max-input-tokens", "not used"),
            Flag("max-total-tokens", "tokens", "prompt and new tokens", "what model and KV allow"),
            Flag("max-best-of", "int", "largest best_of"),
            Flag("max-stop-sequences", "int", "most stop sequences"),
            Flag("max-top-n-tokens", "int", "largest top_n_tokens"),
            Flag("max-client-batch-size", "int", "most prompts in one completion call"),
            Flag("payload-limit", "bytes", "largest request body"),
            Flag("disable-grammar-support", "switch", "refuse grammars, response_format and tools"),
            Flag("max-grammar-bytes", "bytes", "largest grammar or schema"),
            Flag("max-grammar-seconds", "seconds", "of CPU time to compile a grammar"),
        ),
    ),
    (
        "Batching and memory",
        (
            Flag("max-concurrent-requests", "int", "requests in the house; more get status 429"),
            Flag("max-batch-size", "int", "sequences that run at once", "max-concurrent-requests"),
            Flag("max-batch-prefill-tokens", "tokens", "prompt tokens in hand at once", "4096"),
            Flag("max-batch-total-tokens", "tokens", "KV tokens", "as many as memory holds"),
            Flag("step-token-budget", "tokens", "most tokens one step computes", "512"),
            Flag("max-queued-tokens", "tokens", "prompt tokens that wait", "no limit of its own"),
            Flag(
                "waiting-served-ratio",
                "ratio",
                "waiting / running that makes steps as long as target-itl",
            ),
            Flag(
                "max-waiting-tokens",
                "int",
                "steps with requests waiting, after which one such step comes",
            ),
            Flag("target-itl", "seconds", "longest step while requests wait for their prompts"),
            Flag(
                "target-ttft",
                "seconds",
                "who cannot have a first token by then lets others go first",
                "3 times a prompt, at least 1",
            ),
            Flag("prefix-caching", "bool", "reuse KV blocks of equal prompt beginnings"),
            Flag("speculate", "int", "tokens guessed ahead per step, from the text so far"),
            Flag("validation-workers", "int", "threads that tokenize"),
        ),
    ),
    (
        "HTTP",
        (
            Flag("hostname", "ip", "address to listen on"),
            Flag("port", "int", "port to listen on; 0 takes a free one", short="-p"),
            Flag(
                "bind",
                "address",
                "host:port or unix:/path; repeatable",
                "hostname:port",
                many=True,
            ),
            Flag("aip-http-port", "int", "port that Vertex AI sets; wins over port", "port"),
            Flag("aip-predict-route", "route", "another path of /vertex, for Vertex AI", "none"),
            Flag("aip-health-route", "route", "another path of /health, for Vertex AI", "none"),
            Flag("ssl-certfile", "path", "certificates as PEM: serve HTTPS", "HTTP"),
            Flag("ssl-keyfile", "path", "key of the certificate as PEM", "in ssl-certfile"),
            Flag("api-key", "key", "key of inference routes; repeatable", "none", many=True),
            Flag("api-key-file", "path", "more keys, one per line", "none"),
            Flag("cors-allow-origin", "text", "allowed origin; repeatable", many=True),
        ),
    ),
    (
        "Operations",
        (
            Flag("json-output", "switch", "log lines as JSON"),
            Flag("prometheus-port", "int", "another port for the metrics", "the main port only"),
            Flag("otlp-endpoint", "collector", "where traces go, by OTLP over gRPC", "no traces"),
            Flag("otlp-service-name", "text", "service.name of the traces"),
            Flag(
                "env", "switch", "print what `doctor` finds, then serve", variable=False, short="-e"
            ),
            Flag("graceful-termination-timeout", "seconds", "for streams at SIGTERM", short="-g"),
            Flag("stall-timeout", "seconds", "without a step before a shard counts as hung"),
            Flag("shard-restart-limit", "int", "failed starts of the shard in a row"),
            Flag("record-schedule", "path", "write a trace to replay scheduling from", "none"),
            Flag("spin-us", "us", "microseconds to spin before sleeping; costs CPU when idle"),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Refused:
    """A flag of another build: using it is an error, unless it asks for what we do anyway."""

    name: str
    why: str
    same: tuple[str, ...] = ()  # values that change nothing here, so they are let through
    short: str = ""
    env: bool = True  # False: the variable belongs to others too, so it is left alone


_OWN_KERNELS = "kernels are chosen by device, dtype and model: on a CPU --cpu-backend chooses"
_NO_NGROK = "there is no ngrok tunnel: run ngrok beside the server"
_NO_ROPE = "rotary scaling is read from the model's config.json: set rope_scaling there"
_ONE_WATERMARK = "watermarks use gamma 0.5 and delta 2.0"
_ONE_MACHINE = "shards run on this machine and talk over shared memory: there is nothing to set"

REFUSED: Final[tuple[Refused, ...]] = (
    Refused("kv-cache-dtype", "the KV cache has the model's dtype: use --dtype"),
    Refused("lora-adapters", "LoRA adapters are not in this build: merge them into the model"),
    Refused("disable-custom-kernels", _OWN_KERNELS, same=("false",)),
    Refused("rope-scaling", _NO_ROPE),
    Refused("rope-factor", _NO_ROPE),
    Refused("watermark-gamma", _ONE_WATERMARK, same=("0.5",)),
    Refused("watermark-delta", _ONE_WATERMARK, same=("2", "2.0")),
    Refused("weights-cache-override", "give the folder of the weights to --model-id"),
    Refused(
        "enable-prefill-logprobs",
        "any request may ask for them with decoder_input_details",
        same=("true",),
    ),
    Refused("max-image-fetch-size", "images are not in this build"),
    Refused("tokenizer-name", "the tokenizer is the model's: use --model-id"),
    Refused("shard-uds-path", _ONE_MACHINE),
    Refused("master-shard-uds-path", _ONE_MACHINE),
    Refused("master-addr", _ONE_MACHINE, env=False),
    Refused("master-port", _ONE_MACHINE, env=False),
    Refused("usage-stats", "nothing is ever sent anywhere", same=("off",)),
    Refused("ngrok", _NO_NGROK, same=("false",)),
    Refused("ngrok-authtoken", _NO_NGROK, env=False),
    Refused("ngrok-edge", _NO_NGROK, env=False),
)


def all_flags() -> tuple[Flag, ...]:
    """Return every row of `FLAGS`, without the groups."""
    return tuple(flag for _, rows in FLAGS for flag in rows)
