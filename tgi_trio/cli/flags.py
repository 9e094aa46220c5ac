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
    unset: str = ""  # what applies if the default is None, () or 0
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
            Flag(
                "mmproj",
                "text",
                "projector of a GGUF model that sees: a file, or one of the model's repository or"
                " folder (mmproj-F16.gguf)",
                "of a repository or folder its own, F16 before others",
            ),
            Flag("no-mmproj", "switch", "serve the text alone of a GGUF model that sees"),
            Flag("dtype", "dtype", f"compute in {', '.join(DTYPES)}", "the checkpoint's"),
            Flag(
                "quantize",
                "quantization",
                "what plain weights are rounded to while they are loaded (eetq, q4_k, fp8, ...);"
                " quantised checkpoints are recognised without it",
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
                "bits of the activations that quantised weights are multiplied with: 8, which is"
                " faster, or 16; on a device 8 is for int8 and FP8 weights; for FP8, NF4 and the"
                " like see docs/models.md",
                "8 where that is faster in the CPU kernels, else 16",
            ),
            Flag(
                "batch-invariant",
                "switch",
                "the same answer at any load, to the bit (deterministic inference), on devices"
                " too, where it is slower; the CPU kernels always do so",
            ),
            Flag(
                "rope-scaling",
                "rope",
                f"scale rotary positions: one of {', '.join(ROPE_SCALINGS)}",
                "as config.json says; linear with rope-factor",
            ),
            Flag(
                "rope-factor", "factor", "by how much longer sequences get", "1 with rope-scaling"
            ),
            Flag(
                "cpu-backend",
                "backend",
                f"what computes on a CPU, one of {', '.join(CPU_BACKENDS)}: auto takes the"
                " kernels where they serve the model",
            ),
            Flag("cpu-threads", "int", "threads of a shard on a CPU", "by the model's size"),
            Flag("device", "text", "cpu, cuda, xpu or auto: what torch sees, else the CPU"),
            Flag(
                "cuda-graphs",
                "sizes",
                "batch sizes to record as CUDA graphs, alone and with prompts; 0 for none",
                "1,2,4,8,16,24,... up to the largest batch, where there is a CUDA device",
            ),
            Flag("cuda-memory-fraction", "share", "of each CUDA device's memory to use; above 0"),
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
            Flag(
                "reasoning",
                "reasoning",
                "marks around a model's thoughts: auto (from its files), none, or START,END",
            ),
            Flag("served-model-name", "text", "name in the API; repeatable", "model-id", many=True),
            Flag(
                "lora-adapters",
                "adapters",
                "LoRA adapters, separated by commas: id, id=path, id@revision or id=path@revision",
                "none",
            ),
            Flag("max-lora-rank", "int", "largest rank that an adapter may have"),
            Flag(
                "max-loaded-adapters",
                "int",
                "adapters in memory at a time; others are loaded when they are asked for",
            ),
            Flag(
                "adapter-tokenizers",
                "whose",
                "tokenizers and templates of adapters: own (in their folders), base (the model's)",
            ),
            Flag("adapter-updates", "switch", "routes that load and unload adapters; needs a key"),
            Flag("adapter-folder", "path", "where these routes may load from", "nowhere"),
            Flag(
                "sharded",
                "bool",
                "split the model over num-shard ranks, or else over all visible devices",
                "false",
            ),
            Flag("num-shard", "int", "ranks (processes) that the model is split over", "1"),
            Flag("pipeline-stages", "int", "stages of layers, each for an equal share of ranks"),
            Flag("remote-ranks", "int", "how many of them run on other machines: the last"),
            Flag("rank-address", "address", "address at which those ranks are waited for"),
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
            Flag(
                "max-total-tokens",
                "tokens",
                "longest sequence: prompt and answer together",
                "what model and KV allow",
            ),
            Flag("max-best-of", "int", "largest best_of of a request"),
            Flag("max-stop-sequences", "int", "most stop sequences of a request"),
            Flag("max-top-n-tokens", "int", "largest top_n_tokens of a request"),
            Flag("max-client-batch-size", "int", "most prompts in one completion call"),
            Flag("payload-limit", "bytes", "largest request body"),
            Flag(
                "response-store-bytes",
                "bytes",
                "memory for answers of /v1/responses that others may go on from; 0: none is kept",
            ),
            Flag(
                "image-urls",
                "image_urls",
                "where media may be fetched from: none, public (public addresses), or a list of"
                " hosts, networks and ports",
            ),
            Flag("max-image-fetch-size", "bytes", "largest file of an image, a video or a sound"),
            Flag("max-image-pixels", "int", "most pixels of an image; more is not decoded"),
            Flag("max-images-per-prompt", "int", "most images, videos and sounds of one prompt"),
            Flag("max-video-frames", "int", "most frames of a video that the model sees"),
            Flag("max-video-pixels", "int", "most pixels decoded of a video, in all frames"),
            Flag("max-audio-seconds", "seconds", "longest sound"),
            Flag("max-image-bytes", "bytes", "all requests' media before they are decoded"),
            Flag("disable-grammar-support", "switch", "refuse grammars, response_format and tools"),
            Flag("max-grammar-bytes", "bytes", "largest grammar or schema"),
            Flag("max-grammar-seconds", "seconds", "CPU time that compiling a grammar may take"),
        ),
    ),
    (
        "Batching and memory",
        (
            Flag("max-concurrent-requests", "int", "requests that run or wait; others get 429"),
            Flag("max-batch-size", "int", "sequences that run at once", "max-concurrent-requests"),
            Flag(
                "max-batch-prefill-tokens",
                "tokens",
                "tokens of the prompts that are computed at the same time",
                "4096",
            ),
            Flag(
                "max-batch-total-tokens",
                "tokens",
                "tokens of the KV cache",
                "as many as memory holds",
            ),
            Flag("step-token-budget", "tokens", "most tokens that one step computes", "512"),
            Flag(
                "max-queued-tokens",
                "tokens",
                "prompt tokens that wait; what would make them more gets status 429",
                "no limit of its own",
            ),
            Flag(
                "waiting-served-ratio",
                "ratio",
                "waiting / running requests from which on steps may be as long as target-itl",
            ),
            Flag(
                "max-waiting-tokens",
                "int",
                "while fewer wait: steps after which one may be as long as target-itl",
            ),
            Flag("target-itl", "seconds", "longest step while requests wait for their prompts"),
            Flag(
                "target-ttft",
                "seconds",
                "time to first token; a request that is late for it lets others go first",
                "3 times a prompt, at least 1",
            ),
            Flag("prefix-caching", "bool", "reuse K and V where prompts begin alike"),
            Flag(
                "prefix-cache-path",
                "path",
                "folder in which cached prefixes are kept for the next start",
                "none",
            ),
            Flag("prefix-cache-bytes", "bytes", "most kept in that folder, last used first"),
            Flag(
                "prefix-cache-save-seconds",
                "seconds",
                "seconds between two saves while nobody is served, in case the server is killed",
                "at the end alone",
            ),
            Flag(
                "prefix-cache-host-bytes",
                "bytes",
                "host memory, of all ranks together, for blocks that a device's cache evicts",
            ),
            Flag(
                "speculate",
                "int",
                "most tokens drafted per step: by draft-model, or else by drafter",
                "all heads, 4 of a draft model, 0 without one",
            ),
            Flag(
                "draft-model",
                "path",
                "folder or repository of a drafter: trained heads, or a smaller model",
                "the heads of the model, else the text so far",
            ),
            Flag(
                "drafter",
                "drafter",
                "what drafts without draft-model: ngram (the text so far) or mtp (layers of the"
                " model's own)",
                "mtp where the checkpoint has such layers",
            ),
            Flag("feature-memory", "bytes", "for features of media that may come again"),
            Flag("image-memory", "bytes", "memory, shared with the shard, for pixels and sounds"),
            Flag("watermark-gamma", "share", "of the vocabulary that a watermark prefers; below 1"),
            Flag("watermark-delta", "number", "added to the logits of that share"),
            Flag("validation-workers", "int", "threads that tokenize prompts"),
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
                "host:port or unix:/path to listen on, in place of hostname and port; repeatable",
                "hostname:port",
                many=True,
            ),
            Flag("aip-http-port", "int", "port that Vertex AI sets; wins over port", "port"),
            Flag("aip-predict-route", "route", "another path of /vertex, for Vertex AI", "none"),
            Flag("aip-health-route", "route", "another path of /health, for Vertex AI", "none"),
            Flag("ssl-certfile", "path", "PEM file of certificates: serve HTTPS", "HTTP"),
            Flag("ssl-keyfile", "path", "PEM file of the certificate's key", "in ssl-certfile"),
            Flag("api-key", "key", "key for inference routes; repeatable", "none", many=True),
            Flag("api-key-file", "path", "file of more keys, one per line", "none"),
            Flag("cluster-secret-file", "path", "file of the line that fronts show", "none"),
            Flag(
                "cors-allow-origin",
                "origin",
                "origin whose pages may call; repeatable",
                "any",
                many=True,
            ),
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
            Flag("prometheus-port", "int", "a port for the metrics, too", "the main port only"),
            Flag("otlp-endpoint", "collector", "where traces go, by OTLP over gRPC", "no traces"),
            Flag("otlp-service-name", "text", "service.name of the traces"),
            Flag(
                "env", "switch", "print what `doctor` finds, then serve", variable=False, short="-e"
            ),
            Flag(
                "graceful-termination-timeout",
                "seconds",
                "time for running streams after SIGTERM",
                short="-g",
            ),
            Flag("shutdown-delay", "seconds", "from a red /health at SIGTERM to the first 503"),
            Flag("stall-timeout", "seconds", "without a step, after which a shard counts as hung"),
            Flag(
                "shard-restart-limit",
                "int",
                "crashes of the shard in a row after which it is still started again",
            ),
            Flag("record-schedule", "path", "file to record scheduling in, for replays", "none"),
            Flag("spin-us", "us", "microseconds to spin before sleeping; costs CPU when idle"),
        ),
    ),
)


def list_flags() -> tuple[Flag, ...]:
    """Return all rows of `FLAGS`, without groups."""
    return tuple(flag for _, rows in FLAGS for flag in rows)
