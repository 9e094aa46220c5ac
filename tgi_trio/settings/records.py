"""What the server can be told, and what it runs with: every setting with its type and default.

`Options` is what came from flags and environment, `Settings` what the server runs with.
`checks.py` says what cannot be asked for, `resolve.py` makes the one into the other.
Names and defaults are TGI's wherever TGI has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tgi_trio.model.config import RopeScaling

DTYPES: Final = ("float32", "bfloat16", "float16")
# TGI's words, then ours. Some are formats of checkpoints, which are recognised without the flag,
# some are made of plain numbers at load, and some are both: `model/quantised/recognise.py`.
QUANTIZATIONS: Final = (
    *("awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin"),
    *("bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "fp8"),
    *("gguf", "mxfp4", "modelopt", "int4", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k"),
)
KV_CACHE_DTYPES: Final = ("fp8_e4m3fn", "fp8_e5m2")  # TGI's words
ACTIVATIONS: Final = (8, 16)  # bits
ROPE_SCALINGS: Final = ("linear", "dynamic")
CPU_BACKENDS: Final = ("auto", "numba", "torch")  # auto: numba where the model fits it


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """What a shard is told as it was given: flags whose values travel whole to where they act.

    A new flag of the shard is a field here, a row of `cli.flags.FLAGS`, and the code that acts.
    """

    quantize: str | None = None  # of QUANTIZATIONS; None in `Settings`: as they are
    kv_cache_dtype: str | None = None  # of KV_CACHE_DTYPES; None: the model's dtype
    # Of ACTIVATIONS: what quantised weights are multiplied by; None: 8 by the CPU kernels, else 16
    activations: int | None = None
    rope_scaling: str | None = None  # of ROPE_SCALINGS
    rope_factor: float | None = None  # how many times as long sequences may become
    cpu_backend: str = "auto"  # of CPU_BACKENDS
    cpu_threads: int = 0  # 0: as many as the model's size is worth
    device: str = "auto"  # "cpu", or a kind as torch names them; "auto": what torch sees
    cuda_graphs: tuple[int, ...] | None = (
        None  # batch sizes; (): none; None: up to the largest batch, on CUDA
    )
    pipeline_stages: int = 1  # runs of layers that the model is cut into, one for each rank
    cuda_memory_fraction: float = 1.0  # of each CUDA device's memory
    trust_remote_code: bool = False
    # Tokens guessed ahead per step and sequence at most; None: as many as a drafter that was asked
    # for has heads, DRAFTED for a model, 0 without one. Decided in `Settings`.
    speculate: int | None = None
    draft_model: Path | None = None  # folder of what guesses: heads, or a smaller model
    watermark_gamma: float = 0.5  # share of the vocabulary that a watermark prefers
    watermark_delta: float = 2.0  # what it adds to their logits
    feature_memory: int = 2**28  # bytes of images' features that are kept for who asks again

    @property
    def rope(self) -> RopeScaling | None:
        """Return the rotary scaling that was asked for; a factor alone is linear, as TGI has it."""
        if self.rope_scaling is None and self.rope_factor is None:
            return None
        factor = 1.0 if self.rope_factor is None else self.rope_factor
        return RopeScaling(self.rope_scaling or "linear", factor)


@dataclass(frozen=True, kw_only=True)
class AsGiven(ShardOptions):
    """What needs no decision: the same in `Options` and in `Settings`."""

    revision: str | None = None
    huggingface_hub_cache: Path | None = None
    tokenizer_name: str | None = None  # folder or repository; None: the model's
    tokenizer_config_path: Path | None = None
    chat_template: str | None = None  # a path or the template itself; overrides the model's
    default_chat_template_kwargs: Mapping[str, Any] | None = None  # where a request says nothing
    reasoning: str = "auto"  # how thoughts are known: auto, none, or both marks as START,END
    lora_adapters: tuple[str, ...] = ()  # id, id=path, id@revision or id=path@revision
    max_lora_rank: int = 64
    max_loaded_adapters: int = (
        32  # in the shard's memory; others are loaded when they are asked for
    )
    adapter_updates: bool = False  # whether routes load and unload adapters
    adapter_folder: Path | None = None  # below which such a route may load from
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
    image_urls: str = "public"  # which are fetched: none, public, or hosts, networks and ports
    max_image_fetch_size: int = 20 * 2**20  # bytes of a compressed image
    max_image_pixels: int = 20_000_000  # of an image as it comes
    max_images_per_prompt: int = 8
    max_image_bytes: int = 128 * 2**20  # of all requests' images, as they came
    image_memory: int = 256 * 2**20  # bytes of all images' pixels on their way to the shard
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    target_itl: float = 0.05  # seconds between tokens that are fine while requests wait
    target_ttft: float | None = None  # seconds to a first token; None: from what prompts take here
    prefix_caching: bool = True  # only where the model allows it
    hostname: str = "0.0.0.0"
    port: int = 3000  # 0: any free one
    cors_allow_origin: tuple[str, ...] = ()
    bind: tuple[str, ...] = ()  # host:port or unix:path; empty: hostname and port
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    api_key: tuple[str, ...] = field(default=(), repr=False)  # any of them opens
    api_key_file: Path | None = None  # more of them, one per line
    cluster_secret_file: Path | None = None  # one line; whoever sends it is a front
    aip_http_port: int | None = None  # Vertex AI sets it; wins over `port`
    aip_predict_route: str | None = None  # another path of /vertex
    aip_health_route: str | None = None  # another path of /health
    json_output: bool = False
    logger_level: str = "info"  # or a filter by module, see log_levels
    prometheus_port: int | None = None  # where the metrics are served as well
    otlp_endpoint: str | None = None  # http(s)://host:port of an OpenTelemetry collector
    otlp_service_name: str = "text-generation-inference.router"  # TGI's
    env: bool = False  # say what the machine has before anything is loaded
    graceful_termination_timeout: float = 90.0  # seconds
    shutdown_delay: float = 0.0  # seconds from the signal until new requests are refused
    stall_timeout: float = 60.0  # seconds without a step while there is work
    shard_restart_limit: int = 5  # starts that may fail in a row
    record_schedule: Path | None = None  # a trace of every scheduling decision goes there
    remote_ranks: int = 0  # the last of `num_shard`, which run on other machines and call
    rank_address: str = "0.0.0.0:29400"  # where those are waited for
    shard: tuple[str, ...] = ()  # tcp://host:port: the last of `num_shard`, which are called
    spin_us: int = 0  # microseconds a reader of a ring spins before it sleeps

    @property
    def serves_adapters(self) -> bool:
        """Return whether requests may ever ask for one."""
        return bool(self.lora_adapters) or self.adapter_updates

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return what to listen on, each as host:port, [host]:port or unix:path."""
        port = self.port if self.aip_http_port is None else self.aip_http_port
        return self.bind or (self._at(port),)

    @property
    def ranks_elsewhere(self) -> int:
        """Return how many of the ranks run on other machines, the last of all."""
        return len(self.shard) or self.remote_ranks

    @property
    def rank_addresses(self) -> tuple[str, ...]:
        """Return where ranks of other machines are waited for, if any are to come."""
        return (self.rank_address,) if self.remote_ranks else ()

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
    tokenizer_path: Path  # the folder that tokenizer and chat template come from
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
    model_pipeline_tag: str | None = None  # of the hub; set by the launcher once it has answered
    adapter_folders: Mapping[str, str] = field(default_factory=dict)  # of --lora-adapters, by name
    # What guesses tokens ahead: "ngram" (the text so far), "medusa", "mlp_speculator", "eagle3",
    # "model" (a smaller one); None: nothing does.
    drafter: str | None = None
    kv_blocks: int = 0  # that can be handed out; set by `with_kv`
    state_slots: int = 0  # the same of slots for states; 0: the model keeps none
    kv_block_size: int = 0  # tokens; set by `with_kv`
    serving: tuple[str, ...] = ()  # how the model is served, as "name: value"; set by `with_model`
    asked: frozenset[str] = frozenset()  # names whose value came from a flag or the environment
    overruled: frozenset[str] = frozenset()  # names whose value the loaded model does not allow
