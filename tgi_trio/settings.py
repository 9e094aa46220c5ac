"""From what the person asked for and what the model is to every final number.

`Options` is what came from flags and environment, `ModelFacts` what the model folder says,
`Settings` what the server runs with. `resolve` makes the first two into the third before anything
starts; `with_kv` finishes it once the warm-up has found how many KV blocks fit. Both are pure.

Names, defaults and the texts of the checks are TGI's wherever TGI has them.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Final

from tgi_trio.errors import ConfigurationError
from tgi_trio.model_facts import ModelFacts as ModelFacts
from tgi_trio.model_facts import read_model_facts as read_model_facts

DTYPES: Final = ("float32", "bfloat16", "float16")
QUANTIZATIONS: Final = ("eetq",)  # TGI's name for 8-bit weights that are made at load
CPU_BACKENDS: Final = ("auto", "numba", "torch")  # auto: numba where the model fits it

DEFAULT_POSITIONS: Final = 4096  # for a model that states no longest sequence
DEFAULT_PREFILL_TOKENS: Final = 4096  # TGI's, where no accelerator suggests another
DEFAULT_STEP_TOKENS: Final = 512  # a prefill chunk that a running stream can wait for


@dataclass(frozen=True, kw_only=True)
class AsGiven:
    """What needs no decision: the same in `Options` and in `Settings`."""

    revision: str | None = None
    huggingface_hub_cache: Path | None = None
    trust_remote_code: bool = False
    tokenizer_config_path: Path | None = None
    chat_template: str | None = None  # a path or the template itself; overrides the model's
    validation_workers: int = 2
    max_concurrent_requests: int = 128
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    disable_grammar_support: bool = False
    max_grammar_bytes: int = 2**16  # of a grammar as llguidance reads it
    max_grammar_seconds: float = 0.5  # of CPU time to compile one
    payload_limit: int = 2_000_000  # bytes
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    target_itl: float = 0.05  # seconds between tokens that are fine while requests wait
    target_ttft: float | None = None  # seconds to a first token; None: from what prompts take here
    prefix_caching: bool = True  # only where the model allows it
    speculate: int = 0  # tokens guessed ahead per step and sequence at most
    quantize: str | None = None  # of QUANTIZATIONS
    cpu_backend: str = "auto"  # of CPU_BACKENDS
    cpu_threads: int = 0  # 0: as many as the model's size is worth
    cuda_graphs: tuple[int, ...] | None = None  # batch sizes; (): none; None: TGI's, on CUDA
    cuda_memory_fraction: float = 1.0  # of each CUDA device's memory
    hostname: str = "0.0.0.0"
    port: int = 3000  # 0: any free one
    cors_allow_origin: tuple[str, ...] = ()
    bind: tuple[str, ...] = ()  # host:port or unix:path; empty: hostname and port
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    api_key: tuple[str, ...] = field(default=(), repr=False)  # any of them opens
    api_key_file: Path | None = None  # more of them, one per line
    aip_http_port: int | None = None  # Vertex AI sets it; wins over `port`
    aip_predict_route: str | None = None  # another path of /vertex
    aip_health_route: str | None = None  # another path of /health
    json_output: bool = False
    prometheus_port: int | None = None  # where the metrics are served as well
    otlp_endpoint: str | None = None  # http(s)://host:port of an OpenTelemetry collector
    otlp_service_name: str = "text-generation-inference.router"  # TGI's
    env: bool = False  # say what the machine has before anything is loaded
    graceful_termination_timeout: float = 90.0  # seconds
    stall_timeout: float = 60.0  # seconds without a step while there is work
    shard_restart_limit: int = 5  # starts that may fail in a row
    record_schedule: Path | None = None  # a trace of every scheduling decision goes there
    spin_us: int = 0  # microseconds a reader of a ring spins before it sleeps

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return what to listen on, each as host:port, [host]:port or unix:path."""
        port = self.port if self.aip_http_port is None else self.aip_http_port
        return self.bind or (self._at(port),)

    @property
    def metrics_addresses(self) -> tuple[str, ...]:
        """Return where the metrics have a port of their own, if anywhere."""
        return () if self.prometheus_port is None else (self._at(self.prometheus_port),)

    def _at(self, port: int) -> str:
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{host}:{port}"


@dataclass(frozen=True, kw_only=True)
class Options(AsGiven):
    """What the person asked for; None leaves the decision to `resolve`."""

    model_id: str | None = None  # None: the embedded model
    served_model_name: tuple[str, ...] = ()
    dtype: str | None = None
    sharded: bool | None = None
    num_shard: int | None = None
    max_input_tokens: int | None = None
    max_input_length: int | None = None  # TGI's older name of the same
    max_total_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    max_batch_size: int | None = None
    step_token_budget: int | None = None
    max_queued_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Settings(AsGiven):
    """Every number the server runs with. Made by `resolve`, finished by `with_kv`."""

    model_id: str
    model_sha: str | None
    model_path: Path
    model_type: str
    served_model_names: tuple[str, ...]  # never empty
    dtype: str
    num_shard: int
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int  # 0 until `with_kv`, unless it was asked for
    max_batch_size: int  # sequences that run at once; at most `step_token_budget`
    step_token_budget: int  # tokens a step may compute; at most `max_batch_prefill_tokens`
    max_queued_tokens: int  # prompt tokens of all requests in the queue
    kv_blocks: int = 0  # that can be handed out; set by `with_kv`
    kv_block_size: int = 0  # tokens; set by `with_kv`
    asked: frozenset[str] = frozenset()  # names whose value came from a flag or the environment


# ---- deciding ------------------------------------------------------------------------------


def resolve(options: Options, facts: ModelFacts) -> Settings:
    """Decide everything that can be decided before the model is loaded.

    Raises ConfigurationError, naming the setting, when the options cannot work together.
    """
    check(options)
    max_input, max_total = _lengths(options, facts)
    max_prefill, budget, batch_size = _step_limits(options, facts)
    name = options.model_id or "tgi-trio/demo"
    return Settings(
        **{f.name: getattr(options, f.name) for f in fields(AsGiven)},
        model_id=name,
        model_sha=facts.revision_sha,
        model_path=facts.path,
        model_type=facts.model_type,
        served_model_names=options.served_model_name or (name,),
        dtype=_dtype(options, facts),
        num_shard=_num_shard(options),
        max_input_tokens=max_input,
        max_total_tokens=max_total,
        max_batch_prefill_tokens=max_prefill,
        max_batch_total_tokens=options.max_batch_total_tokens or 0,
        max_batch_size=batch_size,
        step_token_budget=budget,
        max_queued_tokens=options.max_queued_tokens or options.max_concurrent_requests * max_total,
        asked=_asked(options),
    )


def with_kv(settings: Settings, blocks: int, block_size: int) -> Settings:
    """Finish settings with what the warm-up found.

    `blocks` are those that can be handed out, so without block 0; `block_size` is in tokens.
    Limits that nobody asked for shrink to what fits. Raises ConfigurationError when one that was
    asked for does not fit.
    """
    supported = blocks * block_size
    if settings.max_batch_total_tokens:
        supported = min(supported, settings.max_batch_total_tokens)
    max_total = settings.max_total_tokens
    if "max_total_tokens" not in settings.asked:
        max_total = min(max_total, supported)
    if max_total > supported or supported < 2:
        raise ConfigurationError(
            f"Not enough memory to handle `max_total_tokens={max_total}`: the KV cache holds "
            f"{supported} tokens. Lower --max-total-tokens, raise --max-batch-total-tokens if it "
            f"is set, or use a smaller model or --dtype bfloat16"
        )
    max_input = settings.max_input_tokens
    if "max_input_tokens" not in settings.asked:
        max_input = min(max_input, max_total - 1)
    elif max_input >= max_total:
        raise ConfigurationError(
            "`max_input_tokens` must be < `max_total_tokens`. Given: "
            f"{max_input} and {max_total} (what the KV cache holds)"
        )
    queued = settings.max_queued_tokens
    if "max_queued_tokens" not in settings.asked:
        queued = settings.max_concurrent_requests * max_total
    prefill = settings.max_batch_prefill_tokens
    if prefill > supported and "max_batch_prefill_tokens" in settings.asked:
        raise ConfigurationError(
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {prefill} and {supported}"
        )
    prefill = min(prefill, supported)
    budget = min(settings.step_token_budget, prefill)
    return replace(
        settings,
        max_input_tokens=max_input,
        max_total_tokens=max_total,
        max_batch_prefill_tokens=prefill,
        max_batch_total_tokens=supported,
        max_batch_size=min(settings.max_batch_size, budget),
        step_token_budget=budget,
        max_queued_tokens=queued,
        kv_blocks=blocks,
        kv_block_size=block_size,
    )


_AT_LEAST_ONE: Final = (
    "validation_workers",
    "max_concurrent_requests",
    "max_best_of",
    "max_client_batch_size",
    "payload_limit",
    "max_grammar_bytes",
    "max_grammar_seconds",
    "max_input_tokens",
    "max_input_length",
    "max_total_tokens",
    "max_batch_prefill_tokens",
    "max_batch_total_tokens",
    "max_batch_size",
    "step_token_budget",
    "max_queued_tokens",
    "stall_timeout",
    "target_ttft",
)
_AT_LEAST_ZERO: Final = (
    "max_stop_sequences",
    "max_top_n_tokens",
    "waiting_served_ratio",
    "max_waiting_tokens",
    "target_itl",
    "port",
    "aip_http_port",
    "prometheus_port",
    "graceful_termination_timeout",
    "shard_restart_limit",
    "spin_us",
    "speculate",
    "cpu_threads",
)


def check(options: Options) -> None:
    """Raise ConfigurationError for what is wrong whatever the model is."""
    _num_shard(options)
    for name in _AT_LEAST_ONE:
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ConfigurationError(f"`{name}` must be > 0. Given: {value}")
    for name in _AT_LEAST_ZERO:
        value = getattr(options, name)
        if value is not None and value < 0:
            raise ConfigurationError(f"`{name}` must be >= 0. Given: {value}")
    for name in ("port", "aip_http_port", "prometheus_port"):
        port = getattr(options, name)
        if port is not None and port > 65535:
            raise ConfigurationError(f"`{name}` must be <= 65535. Given: {port}")
    if not 0 < options.cuda_memory_fraction <= 1:
        raise ConfigurationError(
            f"`cuda_memory_fraction` must be > 0 and <= 1. Given: {options.cuda_memory_fraction}"
        )
    try:
        ipaddress.ip_address(options.hostname)
    except ValueError:
        raise ConfigurationError(
            f"`hostname` must be an IP address such as 127.0.0.1. Given: {options.hostname}"
        ) from None
    if options.cpu_backend not in CPU_BACKENDS:
        raise ConfigurationError(
            f"`cpu_backend` must be one of {', '.join(CPU_BACKENDS)}. Given: {options.cpu_backend}"
        )
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ConfigurationError(
            f"`dtype` must be one of {', '.join(DTYPES)}. Given: {options.dtype}"
        )
    _check_quantize(options)


def _check_quantize(options: Options) -> None:
    if options.quantize is None:
        return
    if options.quantize not in QUANTIZATIONS:
        raise ConfigurationError(
            f"`quantize` must be {', '.join(QUANTIZATIONS)}. Given: {options.quantize}"
        )
    if options.cpu_backend == "torch" or _num_shard(options) > 1:
        raise ConfigurationError(
            "`quantize` is done by the CPU kernels, on one rank: leave it out, or leave out "
            "`cpu_backend` torch and `num_shard`"
        )


def _lengths(options: Options, facts: ModelFacts) -> tuple[int, int]:
    """Return (max_input_tokens, max_total_tokens)."""
    max_input = options.max_input_tokens
    if options.max_input_length is not None:
        if max_input is not None:
            raise ConfigurationError(
                f"`max_input_tokens` ({max_input}) and `max_input_length` "
                f"({options.max_input_length}) are both set: define only `max_input_tokens`"
            )
        max_input = options.max_input_length
    longest = facts.max_positions
    max_total = options.max_total_tokens
    if max_total is None:
        known = [n for n in (longest, facts.tokenizer_max_length) if n is not None]
        max_total = min(known, default=DEFAULT_POSITIONS)
        max_total = min(max_total, options.max_batch_total_tokens or max_total)
    elif longest is not None and max_total > longest:
        raise ConfigurationError(
            f"`max_total_tokens` must be <= {longest}, the longest sequence this model can "
            f"handle. Given: {max_total}"
        )
    if max_input is None:
        max_input = max_total - 1
    if not 0 < max_input < max_total:
        raise ConfigurationError(
            f"`max_input_tokens`({max_input}) must be < `max_total_tokens`({max_total})"
        )
    whole = options.max_batch_total_tokens
    if whole is not None and max_total > whole:
        raise ConfigurationError(
            "`max_total_tokens` must be <= `max_batch_total_tokens`. "
            f"Given: {max_total} and {whole}"
        )
    return max_input, max_total


def _step_limits(options: Options, facts: ModelFacts) -> tuple[int, int, int]:
    """Return (max_batch_prefill_tokens, step_token_budget, max_batch_size).

    They hold batch size <= budget <= prefill tokens: a step has room for one token of every
    running sequence, and no step is larger than the one the warm-up measured.
    """
    prefill = options.max_batch_prefill_tokens
    budget = options.step_token_budget
    batch = options.max_batch_size
    if prefill is None:
        prefill = min(DEFAULT_PREFILL_TOKENS, facts.max_positions or DEFAULT_PREFILL_TOKENS)
        prefill = max(prefill, budget or 0, batch or 0)
    if (whole := options.max_batch_total_tokens) is not None and prefill > whole:
        if options.max_batch_prefill_tokens is not None:
            raise ConfigurationError(
                "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. "
                f"Given: {prefill} and {whole}"
            )
        prefill = whole
    if budget is None:
        budget = min(prefill, max(DEFAULT_STEP_TOKENS, batch or 0))
    elif budget > prefill:
        raise ConfigurationError(
            "`step_token_budget` must be <= `max_batch_prefill_tokens`. "
            f"Given: {budget} and {prefill}"
        )
    if batch is None:
        batch = min(options.max_concurrent_requests, budget)
    elif batch > budget:
        raise ConfigurationError(
            f"`max_batch_size` must be <= `step_token_budget`. Given: {batch} and {budget}"
        )
    return prefill, budget, batch


def _dtype(options: Options, facts: ModelFacts) -> str:
    """Without a wish, the checkpoint's own; float16 is widened, a CPU is slow at it."""
    if options.dtype is not None:
        return options.dtype
    return facts.dtype if facts.dtype in ("float32", "bfloat16") else "float32"


def _num_shard(options: Options) -> int:
    """Return the number of ranks, by TGI's rules for `sharded` and `num_shard`."""
    count = options.num_shard
    if options.sharded and count is not None and count <= 1:
        raise ConfigurationError("`sharded` is true but `num_shard` <= 1")
    if count is not None and count < 1:
        raise ConfigurationError("`num_shard` cannot be < 1")
    if options.sharded and count is None:
        raise ConfigurationError("`sharded` is true: say over how many ranks with `num_shard`")
    return count or 1


def _asked(options: Options) -> frozenset[str]:
    """Return the names that differ from their default, the older name under its new one."""
    names = {f.name for f in fields(Options) if getattr(options, f.name) != f.default}
    if "max_input_length" in names:
        names = (names - {"max_input_length"}) | {"max_input_tokens"}
    return frozenset(names)
