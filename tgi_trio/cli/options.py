"""Options of the commands besides `serve`; their defaults are the flags' defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tgi_trio.settings.records import OWN


@dataclass(frozen=True, kw_only=True)
class _Client:
    """Options of what asks a server: one that runs, or a model for which to start one."""

    url: str | None = None  # None: a server of our own
    api_key: str | None = None
    model_id: str | None = None  # of a server of our own
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class ChatOptions(_Client):
    """`chat`."""

    system: str | None = None  # the system message
    max_tokens: int | None = None  # None: as many as there is room for
    temperature: float = 0.7
    tools: Path | None = None  # a file with a JSON list
    color: bool = True


@dataclass(frozen=True, kw_only=True)
class BenchOptions(_Client):
    """`bench`."""

    clients: tuple[int, ...] = (1, 8, 32)
    rate: tuple[float, ...] = ()
    requests: int = 64
    words: int = 40
    max_tokens: int = 64
    json: Path | None = None


@dataclass(frozen=True, kw_only=True)
class BatchOptions(_Client):
    """`batch`."""

    input: Path  # a request on each line
    output: Path  # an answer on each line; a file that is there is gone on with
    clients: int = 16  # requests at a time
    timeout: float = 3600.0  # seconds of a request


@dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    """`download-weights`."""

    model_id: str
    revision: str | None = None
    extension: str = ".safetensors"  # of EXTENSIONS
    auto_convert: bool = True  # convert pickles if there are no safetensors
    merge_lora: bool = False  # merge an adapter into its base
    mmproj: str | None = None  # projector of a GGUF model
    no_mmproj: bool = False
    adapter_tokenizers: str = OWN  # whose tokenizer and template that has
    huggingface_hub_cache: Path | None = None
    trust_remote_code: bool = False
    json_output: bool = False
    logger_level: str = "info"


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """`quantize`; names and defaults of GPTQ's parameters are TGI's."""

    model_id: str
    output: Path
    format: str = "gptq"  # of WEIGHT_FORMATS
    bits: int = 4
    groupsize: int = 128
    percdamp: float = 0.01
    act_order: bool = False
    calibration_text: Path | None = None
    samples: int = 128
    sample_tokens: int = 512
    revision: str | None = None
    huggingface_hub_cache: Path | None = None
    trust_remote_code: bool = False
    json_output: bool = False
    logger_level: str = "info"


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """`cluster`."""

    replicas: tuple[int, int] | None = None  # least and most; None: one
    replicas_file: Path = Path("replicas.txt")
    front_bind: str = "0.0.0.0:3000"  # address of a front for all of them
    no_front: bool = False
    address: str = "auto"  # of the Ray cluster
    replica_cpus: float = 1.0
    replica_gpus: float = 0.0
    nodes_per_replica: int = 1  # machines over which a server's ranks are divided
    server: tuple[str, ...] = ()  # further flags, for the servers
    json_output: bool = False
    logger_level: str = "info"


@dataclass(frozen=True, kw_only=True)
class _Computing:
    """Options of a machine that computes for a router on another one."""

    cluster_secret_file: Path | None = None
    model_id: str | None = None  # None: the router's folder, which exists here as well
    revision: str | None = None
    mmproj: str | None = None  # projector of a GGUF model
    no_mmproj: bool = False
    huggingface_hub_cache: Path | None = None
    trust_remote_code: bool = False
    json_output: bool = False
    logger_level: str = "info"


@dataclass(frozen=True, kw_only=True)
class RankOptions(_Computing):
    """`rank`."""

    leader: str | None = None  # host:port
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class HostOptions(_Computing):
    """`shard`."""

    listen: str = "0.0.0.0:29400"  # host:port


@dataclass(frozen=True, kw_only=True)
class FrontOptions:
    """`front`; options that it shares with the server have the server's defaults."""

    replica: tuple[str, ...] = ()
    replicas_file: Path | None = None
    replica_timeout: float = 3.0  # seconds of silence until a replica counts as dead
    peer: tuple[str, ...] = ()  # host:port of other fronts, UDP
    peer_bind: str | None = None  # host:port of this front, UDP; None: its first address
    known_prefixes: int = 131_072
    cluster_secret_file: Path | None = None
    max_concurrent_requests: int = 4096
    hostname: str = "0.0.0.0"
    port: int = 3000
    bind: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    api_key: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    cors_allow_origin: tuple[str, ...] = ()
    payload_limit: int = 2_000_000  # bytes
    graceful_termination_timeout: float = 90.0  # seconds
    shutdown_delay: float = 0.0  # seconds
    json_output: bool = False
    logger_level: str = "info"

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses to listen on, each as host:port, [host]:port or unix:path."""
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return self.bind or (f"{host}:{self.port}",)


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """`doctor`."""

    port: int = 3000


@dataclass(frozen=True, kw_only=True)
class SchemaOptions:
    """`print-schema`, which has no options."""


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """`completion`."""

    shell: str
