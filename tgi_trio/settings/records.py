"""All settings, with types and defaults.

`Options` come from flags and environment variables; `Settings` are what the server runs with.
`checks.py` checks options, `resolve.py` turns them into settings. Names and defaults are TGI's
where TGI has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tgi_trio.model.config import RopeScaling

DTYPES: Final = ("float32", "bfloat16", "float16")
# TGI's names, then ours. Some are checkpoint formats, which are recognised without the flag; some
# are made from unquantised weights at load time; some are both: `model/quantised/recognise.py`.
QUANTIZATIONS: Final = (
    *("awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin"),
    *("bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "fp8"),
    *("gguf", "mxfp4", "modelopt", "quark", "torchao", "bitnet", "mlx", "hqq", "exl3"),
    *("int4", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k"),
)
KV_CACHE_DTYPES: Final = ("fp8_e4m3fn", "fp8_e5m2")  # TGI's names
ACTIVATIONS: Final = (8, 16)  # bits
ROPE_SCALINGS: Final = ("linear", "dynamic")
LARGEST_ROPE_FACTOR: Final = 1000  # more makes tables of sines that no machine has room for
NGRAM, MTP = "ngram", "mtp"
DRAFTERS: Final = (NGRAM, MTP)  # without a folder: the text so far, the model's own layers
CPU_BACKENDS: Final = ("auto", "kernels", "torch")  # auto: kernels if they can serve the model
OWN, BASE = "own", "base"
ADAPTER_TOKENIZERS: Final = (OWN, BASE)
OLDER_CPU_BACKENDS: Final = MappingProxyType({"numba": "kernels"})  # words of earlier versions


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Flags that are passed to shards unchanged.

    A new flag of the shard is a field here, a row of `cli.flags.FLAGS`, and the code that uses it.
    """

    quantize: str | None = None  # of QUANTIZATIONS; None in `Settings`: weights as stored
    kv_cache_dtype: str | None = None  # of KV_CACHE_DTYPES; None: the model's dtype
    # Of ACTIVATIONS, for products with quantised weights; None: in the CPU kernels 8, or what a
    # matrix unit is as fast with, else 16.
    activations: int | None = None
    # A token's numbers are to the bit the same whatever else a step computes, on devices as well.
    batch_invariant: bool = False
    rope_scaling: str | None = None  # of ROPE_SCALINGS
    rope_factor: float | None = None  # factor by which sequences may become longer
    cpu_backend: str = "auto"  # of CPU_BACKENDS
    cpu_threads: int = 0  # 0: as many as pay for the model's size
    device: str = "auto"  # "cpu", or torch's name of a device type; "auto": what torch finds
    # Batch sizes; (): none; None: up to the largest batch, on CUDA.
    cuda_graphs: tuple[int, ...] | None = None
    pipeline_stages: int = 1  # runs of layers into which the model is cut, one for each rank
    cuda_memory_fraction: float = 1.0  # of each CUDA device's memory
    trust_remote_code: bool = False
    # Most tokens drafted ahead per step and sequence. None: all heads of a given drafter, DRAFTED
    # for a draft model, 0 without one; decided in `Settings`.
    speculate: int | None = None
    draft_model: Path | None = None  # folder of the drafter: speculation heads, or a smaller model
    # Of DRAFTERS; None: the model's own layers where it has such. In `Settings` also "medusa",
    # "mlp_speculator", "eagle", "eagle3", "gemma4_assistant", "model" (a smaller one), as
    # `draft_model` is; None: none drafts.
    drafter: str | None = None
    watermark_gamma: float = 0.5  # part of the vocabulary that a watermark prefers
    watermark_delta: float = 2.0  # what it adds to the logits of those tokens
    feature_memory: int = 2**28  # bytes of cached features of media
    # Of the host's memory, on all ranks, for blocks of cached prefixes that the device evicts.
    prefix_cache_host_bytes: int = 0

    @property
    def rope(self) -> RopeScaling | None:
        """The requested rotary scaling; as in TGI, a factor alone means linear."""
        if self.rope_scaling is None and self.rope_factor is None:
            return None
        factor = 1.0 if self.rope_factor is None else self.rope_factor
        return RopeScaling(self.rope_scaling or "linear", factor)


@dataclass(frozen=True, kw_only=True)
class AsGiven(ShardOptions):
    """Settings that need no decision: the same in `Options` and in `Settings`."""

    revision: str | None = None
    mmproj: str | None = None  # projector of a GGUF model: a path, or a file beside the model's
    no_mmproj: bool = False  # no projector, so that no images are served
    huggingface_hub_cache: Path | None = None
    tokenizer_name: str | None = None  # folder or repository; None: the model's
    tokenizer_config_path: Path | None = None
    chat_template: str | None = None  # a path or the template itself; replaces the model's
    default_chat_template_kwargs: Mapping[str, Any] | None = None  # if a request does not give them
    reasoning: str = "auto"  # marks of thoughts: auto, none, or START,END
    lora_adapters: tuple[str, ...] = ()  # id, id=path, id@revision or id=path@revision
    max_lora_rank: int = 64
    max_loaded_adapters: int = 32  # in the shard's memory; others are loaded on demand
    adapter_tokenizers: str = OWN  # whose tokenizers and templates adapters have: OWN or BASE
    adapter_updates: bool = False  # whether routes load and unload adapters
    adapter_folder: Path | None = None  # folder below which those routes may load
    validation_workers: int = 2
    max_concurrent_requests: int = 128
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    disable_grammar_support: bool = False
    max_grammar_bytes: int = 2**16  # of a grammar in llguidance's format
    max_grammar_seconds: float = 0.5  # of CPU time to compile a grammar
    payload_limit: int = 2_000_000  # bytes
    response_store_bytes: int = 64 * 2**20  # of answers of /v1/responses that are kept; 0: none
    image_urls: str = "public"  # which may be fetched: none, public, or hosts, networks, ports
    max_image_fetch_size: int = 20 * 2**20  # bytes of an encoded image, video or sound
    max_image_pixels: int = 20_000_000  # of an image before it is resized
    max_images_per_prompt: int = 8  # videos and sounds among them
    max_video_frames: int = 768  # that are seen of one
    max_video_pixels: int = 4_000_000_000  # of all frames of one that are decoded
    max_audio_seconds: float = 600.0  # of one sound
    max_image_bytes: int = 128 * 2**20  # bytes of all requests' encoded media
    image_memory: int = 256 * 2**20  # bytes of the arena for pixels and sounds
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    target_itl: float = 0.05  # acceptable seconds between tokens while requests wait
    target_ttft: float | None = None  # seconds to a first token; None: from measured prefill times
    prefix_caching: bool = True  # only if the model allows it
    prefix_cache_path: Path | None = None  # folder where computed prefixes outlive the server
    prefix_cache_bytes: int = 4 * 2**30  # of them that are kept there at most, on all ranks
    prefix_cache_save_seconds: float = 0.0  # between two times that they are; 0: at the end alone
    hostname: str = "0.0.0.0"
    port: int = 3000  # 0: any free port
    cors_allow_origin: tuple[str, ...] = ()
    bind: tuple[str, ...] = ()  # host:port or unix:path; empty: hostname and port
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    api_key: tuple[str, ...] = field(default=(), repr=False)  # any of them is accepted
    api_key_file: Path | None = None  # further keys, one per line
    cluster_secret_file: Path | None = None  # one line; a client that sends it is a front
    aip_http_port: int | None = None  # set by Vertex AI; overrides `port`
    aip_predict_route: str | None = None  # another path for /vertex
    aip_health_route: str | None = None  # another path for /health
    json_output: bool = False
    logger_level: str = "info"  # or a filter by module, see log_levels
    prometheus_port: int | None = None  # further port for the metrics
    otlp_endpoint: str | None = None  # http(s)://host:port of an OpenTelemetry collector
    otlp_service_name: str = "text-generation-inference.router"  # TGI's
    env: bool = False  # show what the machine has before anything is loaded
    graceful_termination_timeout: float = 90.0  # seconds
    shutdown_delay: float = 0.0  # seconds from the signal until new requests are refused
    stall_timeout: float = 60.0  # seconds without a step while there is work
    shard_restart_limit: int = 5  # failed starts in a row that are allowed
    record_schedule: Path | None = None  # file for a trace of every scheduling decision
    remote_ranks: int = 0  # ranks, the last ones, that connect from other machines
    rank_address: str = "0.0.0.0:29400"  # where those connect
    shard: tuple[str, ...] = ()  # tcp://host:port of ranks, the last ones, to which we connect
    spin_us: int = 0  # microseconds for which a ring's reader spins before it sleeps

    @property
    def serves_adapters(self) -> bool:
        """Whether requests may ever ask for an adapter."""
        return bool(self.lora_adapters) or self.adapter_updates

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses to listen on, each as host:port, [host]:port or unix:path."""
        port = self.port if self.aip_http_port is None else self.aip_http_port
        return self.bind or (self._at(port),)

    @property
    def ranks_elsewhere(self) -> int:
        """How many of the ranks, always the last, run on other machines."""
        return len(self.shard) or self.remote_ranks

    @property
    def rank_addresses(self) -> tuple[str, ...]:
        """The address to which ranks on other machines connect, if there are any."""
        return (self.rank_address,) if self.remote_ranks else ()

    @property
    def metrics_addresses(self) -> tuple[str, ...]:
        """The further address of the metrics, if any."""
        return () if self.prometheus_port is None else (self._at(self.prometheus_port),)

    def _at(self, port: int) -> str:
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{host}:{port}"


@dataclass(frozen=True, kw_only=True)
class Options(AsGiven):
    """What the user has asked for; `resolve` decides where a field is None."""

    model_id: str | None = None  # None: the embedded model
    served_model_name: tuple[str, ...] = ()
    dtype: str | None = None
    sharded: bool | None = None
    num_shard: int | None = None
    max_input_tokens: int | None = None
    max_input_length: int | None = None  # TGI's older name of `max_input_tokens`
    max_total_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    max_batch_total_tokens: int | None = None
    max_batch_size: int | None = None
    step_token_budget: int | None = None
    max_queued_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Settings(AsGiven):
    """Every value that the server runs with. Made by `resolve`, completed by `with_kv`."""

    model_id: str
    model_sha: str | None
    model_path: Path
    tokenizer_path: Path  # folder of the tokenizer and chat template
    model_type: str
    served_model_names: tuple[str, ...]  # never empty
    dtype: str
    num_shard: int
    max_input_tokens: int
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_batch_total_tokens: int  # 0 until `with_kv`, unless asked for
    max_batch_size: int  # sequences that run at once; at most `step_token_budget`
    step_token_budget: int  # tokens a step may compute; at most `max_batch_prefill_tokens`
    max_queued_tokens: int  # prompt tokens of all requests in the queue
    model_pipeline_tag: str | None = None  # from the hub; set by the launcher when it has answered
    adapter_folders: Mapping[str, str] = field(default_factory=dict)  # of --lora-adapters, by name
    kv_blocks: int = 0  # that can be granted; set by `with_kv`
    state_slots: int = 0  # slots for recurrent states that can be granted; 0: no states
    host_blocks: int = 0  # copies of evicted blocks that the host's memory holds, on each rank
    host_slots: int = 0  # likewise, of slots for recurrent states
    kv_block_size: int = 0  # tokens; set by `with_kv`
    serving: tuple[str, ...] = ()  # how the model is served, as "name: value"; set by `with_model`
    explicit: frozenset[str] = frozenset()  # names of values from flags or the environment
    overruled: frozenset[str] = frozenset()  # names of values that the model does not allow
