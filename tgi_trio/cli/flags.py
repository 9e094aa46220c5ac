"""A table of all flags of `serve`.

A row's name, with underscores, is the field of `settings.Options` that it sets; its default is that
field's default. The environment variable has the same name in UPPER_SNAKE. A flag overrides its
variable; an empty variable counts as not set. Flags of other commands are in `cli.commands`, those
of text-generation-inference without effect here in `cli.foreign`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from tgi_trio.cli.values import SECRET
from tgi_trio.settings.records import (
    CPU_BACKENDS,
    DTYPES,
    KV_CACHE_DTYPES,
    ROPE_SCALINGS,
    Options,
)


@dataclass(frozen=True, slots=True)
class Flag:
    """A row of `FLAGS`, or of another command's flags."""

    name: str  # kebab-case
    kind: str  # a key of `KINDS`
    help: str  # one line
    unset: str = ""  # what applies if the default is None
    owner: type[Any] = Options  # the dataclass that has the field
    variable: bool = True  # whether the environment may set it
    short: str = ""  # e.g. "-p"
    many: bool = False  # may be given several times
    env_name: str = ""  # the variable's name, if it is not the flag's

    @property
    def field(self) -> str:
        """Its field in `owner`."""
        return self.name.replace("-", "_")

    @property
    def names(self) -> tuple[str, ...]:
        """Its long names; a toggle has two."""
        return (self.name, f"no-{self.name}") if self.kind == "toggle" else (self.name,)

    @property
    def takes_value(self) -> bool:
        """Whether a value must follow it."""
        return self.kind not in ("switch", "toggle")

    @property
    def env(self) -> str:
        """Name of the environment variable; empty if there is none."""
        return (self.env_name or self.field.upper()) if self.variable else ""

    @property
    def secret(self) -> bool:
        """Whether values are never stripped, split or shown; a variable then has a single one."""
        return self.kind in SECRET

    @property
    def default(self) -> Any:
        return next(f.default for f in fields(self.owner) if f.name == self.field)


# (group, rows) in the order of --help
FLAGS: Final[tuple[tuple[str, tuple[Flag, ...]], ...]] = (
    (
        "Model",
        (
            Flag("model-id", "model", "hub repository or local folder", "the embedded model"),
            Flag("revision", "text", "branch, commit or refs/pr/N of a hub repository", "main"),
            Flag("dtype", "dtype", f"compute in {', '.join(DTYPES)}", "the checkpoint's"),
            Flag(
                "quantize",
                "quantization",
                "smaller weights, made while plain ones are loaded (eetq, q4_k, fp8, ...), or what"
                " the checkpoint is, as is seen anyhow",
                "the weights as they are",
            ),
            Flag(
                "kv-cache-dtype",
                "kv_dtype",
                f"keep K and V as one of {', '.join(KV_CACHE_DTYPES)}",
                "as --dtype",
            ),
            Flag(
                "activations",
                "bits",
                "bits of what quantised weights are multiplied by, 8 or 16: 8 is faster; on a"
                " device for int8 and FP8 weights alone; FP8, NF4 and the like: see docs/models.md",
                "by the CPU kernels 8, or what a matrix unit is as fast with; else 16",
            ),
            Flag(
                "batch-invariant",
                "switch",
                "answers that are the same to the bit at any load, on a device too (deterministic"
                " inference): slower there; CPU kernels always give them",
            ),
            Flag(
                "rope-scaling",
                "rope",
                f"scale rotary positions: one of {', '.join(ROPE_SCALINGS)}",
                "as config.json says; linear with rope-factor",
            ),
            Flag(
                "rope-factor",
                "factor",
                "how many times as long sequences may become",
                "1 with rope-scaling",
            ),
            Flag("cpu-backend", "backend", f"one of {', '.join(CPU_BACKENDS)}; see docs"),
            Flag("cpu-threads", "int", "threads of a CPU shard", "by the model's size"),
            Flag("device", "text", "cpu, cuda, xpu or auto: what torch sees, else the CPU"),
            Flag(
                "cuda-graphs",
                "sizes",
                "batch sizes recorded as CUDA graphs, alone and with prompts; 0 for none",
                "1,2,4,8,16,24,... up to the largest batch, where there is a CUDA device",
            ),
            Flag("cuda-memory-fraction", "share", "of each CUDA device's memory, to use; above 0"),
            Flag("trust-remote-code", "switch", "run code that comes with the model, in the shard"),
            Flag("huggingface-hub-cache", "path", "folder of downloads", "huggingface_hub's"),
            Flag("tokenizer-name", "text", "folder or repository of a tokenizer", "the model's"),
            Flag("tokenizer-config-path", "path", "another tokenizer_config.json", "the model's"),
            Flag("chat-template", "text", "path of a Jinja template, or itself", "the model's"),
            Flag(
                "default-chat-template-kwargs",
                "object",
                'template variables of every chat, e.g. {"enable_thinking": false}',
                "none",
            ),
            Flag("reasoning", "reasoning", "marks of thoughts: auto, none or START,END"),
            Flag("served-model-name", "text", "name in the API; repeatable", "model-id", many=True),
            Flag(
                "lora-adapters",
                "adapters",
                "LoRA adapters: id, id=path, id@revision or id=path@revision, by commas",
                "none",
            ),
            Flag("max-lora-rank", "int", "largest rank of an adapter"),
            Flag("max-loaded-adapters", "int", "adapters in memory; others are loaded when asked"),
            Flag("adapter-tokenizers", "whose", "own: those in their folders; base: the model's"),
            Flag("adapter-updates", "switch", "routes that load and unload adapters; needs a key"),
            Flag("adapter-folder", "path", "where such routes may load from", "nowhere"),
            Flag("sharded", "bool", "split the model over several ranks", "false"),
            Flag("num-shard", "int", "number of ranks", "1"),
            Flag("pipeline-stages", "int", "runs of layers, each for an equal share of the ranks"),
            Flag("remote-ranks", "int", "the last of them, which run on other machines"),
            Flag("rank-address", "address", "where those are waited for"),
            Flag(
                "shard",
                "shard",
                "tcp://host:port of a shard that listens on another machine; repeatable",
                "here",
                many=True,
            ),
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
            Flag("response-store-bytes", "bytes", "kept of /v1/responses, to go on from; 0: none"),
            Flag("image-urls", "image_urls", "fetched: none, public, or hosts, networks, ports"),
            Flag("max-image-fetch-size", "bytes", "largest file of an image, a video or a sound"),
            Flag("max-image-pixels", "int", "most pixels of an image; more is not decoded"),
            Flag("max-images-per-prompt", "int", "most images, videos and sounds of one prompt"),
            Flag("max-video-frames", "int", "most frames of a video that a model sees"),
            Flag("max-video-pixels", "int", "most pixels of all frames that are decoded of it"),
            Flag("max-audio-seconds", "seconds", "most seconds of a sound"),
            Flag("max-image-bytes", "bytes", "media of all requests, before they are decoded"),
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
            Flag(
                "prefix-cache-path",
                "path",
                "folder in which those computed are kept for the next start",
                "none",
            ),
            Flag("prefix-cache-bytes", "bytes", "most that is kept there, last used first"),
            Flag(
                "prefix-cache-save-seconds",
                "seconds",
                "after which they are kept while nobody is served, for a server that is killed",
                "at the end alone",
            ),
            Flag(
                "prefix-cache-host-bytes",
                "bytes",
                "of the host's memory, on all ranks, for blocks that a device's cache evicts",
            ),
            Flag(
                "speculate",
                "int",
                "tokens drafted ahead per step: by what draft-model names, else as drafter says",
                "all heads, 4 of a draft model, 0 without one",
            ),
            Flag(
                "draft-model",
                "path",
                "folder or repository of what drafts: heads, or a smaller model",
                "the heads of the model, else the text so far",
            ),
            Flag(
                "drafter",
                "drafter",
                "ngram drafts from the text so far, mtp by layers of the model's own checkpoint",
                "mtp where the checkpoint has such layers",
            ),
            Flag("feature-memory", "bytes", "for features of media that may be asked about again"),
            Flag("image-memory", "bytes", "for pixels and sounds, shared with the shard"),
            Flag("watermark-gamma", "share", "of the vocabulary that a watermark prefers; below 1"),
            Flag("watermark-delta", "number", "what it adds to their logits"),
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
            Flag("cluster-secret-file", "path", "a line that a front shows to be let in", "none"),
            Flag("cors-allow-origin", "origin", "allowed origin; repeatable", many=True),
        ),
    ),
    (
        "Operations",
        (
            Flag("json-output", "switch", "every line of output as JSON"),
            Flag(
                "logger-level",
                "levels",
                "off, error, warn, info, debug, or a filter by module",
                env_name="LOG_LEVEL",
            ),
            Flag("prometheus-port", "int", "another port for the metrics", "the main port only"),
            Flag("otlp-endpoint", "collector", "where traces go, by OTLP over gRPC", "no traces"),
            Flag("otlp-service-name", "text", "service.name of the traces"),
            Flag(
                "env", "switch", "print what `doctor` finds, then serve", variable=False, short="-e"
            ),
            Flag("graceful-termination-timeout", "seconds", "for streams at SIGTERM", short="-g"),
            Flag("shutdown-delay", "seconds", "red health at SIGTERM before requests get 503"),
            Flag("stall-timeout", "seconds", "without a step before a shard counts as hung"),
            Flag("shard-restart-limit", "int", "failed starts of the shard in a row"),
            Flag("record-schedule", "path", "write a trace to replay scheduling from", "none"),
            Flag("spin-us", "us", "microseconds to spin before sleeping; costs CPU when idle"),
        ),
    ),
)


def list_flags() -> tuple[Flag, ...]:
    """Return all rows of `FLAGS`, without groups."""
    return tuple(flag for _, rows in FLAGS for flag in rows)
