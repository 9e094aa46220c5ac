"""A table of all commands: their flags, operands and summaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tgi_trio.cli.checks import (
    check_batch,
    check_bench,
    check_chat,
    check_cluster,
    check_doctor,
    check_front,
    check_nothing,
    check_quantize,
    check_rank,
    check_shard,
)
from tgi_trio.cli.flags import FLAGS, Flag, list_flags
from tgi_trio.cli.options import (
    BatchOptions,
    BenchOptions,
    ChatOptions,
    ClusterOptions,
    CompletionOptions,
    DoctorOptions,
    DownloadOptions,
    FrontOptions,
    HostOptions,
    QuantizeOptions,
    RankOptions,
    SchemaOptions,
)
from tgi_trio.settings.checks import check
from tgi_trio.settings.records import Options

Groups = tuple[tuple[str, tuple[Flag, ...]], ...]


@dataclass(frozen=True, slots=True)
class Command:
    """A row of `COMMANDS`."""

    name: str
    summary: str  # one line of --help
    groups: Groups
    options: type[Any]  # the dataclass that its flags set
    check: Callable[[Any], None] = check_nothing  # raises ConfigurationError
    operand: str = ""  # placeholder of the one word that is not a flag
    operand_field: str = ""  # the field of `options` that the operand sets
    operand_help: str = ""  # what the operand is, for the error if it is missing
    operand_kind: str = "model"  # a key of `KINDS`
    operand_needed: bool = True
    target_field: str = ""  # the field that a second word sets, a path; "": there is none
    serve_field: str = ""  # the field for all other words, a command line of `serve`; "": none

    @property
    def flags(self) -> tuple[Flag, ...]:
        """All flags, without groups."""
        return tuple(flag for _, rows in self.groups for flag in rows)

    @property
    def usage(self) -> str:
        """The command line, after `python -m tgi_trio`."""
        operand = self.operand if self.operand_needed else f"[{self.operand}]"
        serve = "[FLAGS OF serve]" if self.serve_field else ""
        return " ".join(filter(None, (self.name, operand, "[FLAGS]" if self.flags else "", serve)))


def _of_serve(*names: str) -> tuple[Flag, ...]:
    return tuple(flag for flag in list_flags() if flag.name in names)


def _client_flags(owner: type[Any]) -> Groups:
    """Return the flags of `chat`, `bench` and `batch`, which use a running server or start one."""
    return (
        (
            "Server",
            (
                Flag("url", "url", "running server to use", "starts one", owner, variable=False),
                Flag("api-key", "key", "key of that server", "none", owner),
                Flag("model-id", "model", "model, if one is started", "the embedded one", owner),
                Flag("dtype", "dtype", "dtype, if one is started", "the checkpoint's", owner),
            ),
        ),
    )


# Flags of a single command, so most have no environment variable.
_answer: Final = partial(Flag, owner=ChatOptions, variable=False)
_spread: Final = partial(Flag, owner=FrontOptions)
_ask: Final = partial(Flag, owner=BatchOptions, variable=False)
_load: Final = partial(Flag, owner=BenchOptions, variable=False)
_fetch: Final = partial(Flag, owner=DownloadOptions, variable=False)
_keep: Final = partial(Flag, owner=ClusterOptions, variable=False)
_place: Final = partial(Flag, owner=RankOptions, variable=False)
_listen: Final = partial(Flag, owner=HostOptions, variable=False)
_round: Final = partial(Flag, owner=QuantizeOptions, variable=False)

COMMANDS: Final[tuple[Command, ...]] = (
    Command(
        "serve",
        "start the server (the default), for MODEL if it is named",
        FLAGS,
        Options,
        check,
        operand="MODEL",
        operand_field="model_id",
        operand_needed=False,
    ),
    Command(
        "download-weights",
        "fetch MODEL, a hub repository, or convert a folder, and print where it can be served from",
        (
            (
                "Flags",
                (
                    *_of_serve("revision", "huggingface-hub-cache", "trust-remote-code"),
                    *_of_serve("mmproj", "no-mmproj"),
                    _fetch("extension", "extension", "which weights; .bin, .pt stay as they are"),
                    _fetch("auto-convert", "toggle", "convert pickles; none of them is run"),
                    _fetch("merge-lora", "switch", "merge a LoRA adapter into its base"),
                    *_of_serve("adapter-tokenizers", "json-output", "logger-level"),
                ),
            ),
        ),
        DownloadOptions,
        operand="MODEL",
        operand_field="model_id",
        operand_help="to fetch, a hub repository or a folder",
    ),
    Command(
        "quantize",
        "write MODEL with weights of fewer bits to the folder OUTPUT",
        (
            (
                "Weights",
                (
                    _round("format", "weights", "gptq (calibrated), gguf:q4_0 or gguf:q8_0"),
                    _round("bits", "int", "bits of a GPTQ weight: 4"),
                    _round("groupsize", "int", "inputs that share a scale; -1: all"),
                    _round("percdamp", "share", "of the Hessian's mean diagonal, added to it"),
                    _round("act-order", "switch", "columns of the largest inputs come first"),
                ),
            ),
            (
                "Calibration",
                (
                    _round(
                        "calibration-text", "path", "file with the text", "Python's own reference"
                    ),
                    _round("samples", "int", "samples of it that are read"),
                    _round("sample-tokens", "tokens", "tokens of a sample"),
                ),
            ),
            (
                "Flags",
                _of_serve(
                    *("revision", "huggingface-hub-cache", "trust-remote-code"),
                    *("json-output", "logger-level"),
                ),
            ),
        ),
        QuantizeOptions,
        check_quantize,
        operand="MODEL OUTPUT",
        operand_field="model_id",
        operand_help="to quantize, a hub repository or a folder, and the folder to write",
        target_field="output",
    ),
    Command(
        "rank",
        "run one rank of a server on another machine",
        (
            (
                "Flags",
                (
                    _place("leader", "address", "the server's --rank-address", "needed"),
                    _place("rank", "int", "number of the rank to run", "needed"),
                    Flag("cluster-secret-file", "path", "the server's file", "needed", RankOptions),
                    Flag(
                        "model-id",
                        "model",
                        "model on this machine",
                        "the leader's folder",
                        RankOptions,
                    ),
                    *_of_serve("revision", "mmproj", "no-mmproj", "huggingface-hub-cache"),
                    *_of_serve("trust-remote-code", "json-output", "logger-level"),
                ),
            ),
        ),
        RankOptions,
        check_rank,
    ),
    Command(
        "shard",
        "wait on this machine for a router elsewhere (--shard), and compute for it",
        (
            (
                "Flags",
                (
                    _listen("listen", "address", "what the router has as --shard"),
                    Flag("cluster-secret-file", "path", "the router's file", "needed", HostOptions),
                    Flag(
                        "model-id",
                        "model",
                        "model on this machine",
                        "the router's folder",
                        HostOptions,
                    ),
                    *_of_serve("revision", "mmproj", "no-mmproj", "huggingface-hub-cache"),
                    *_of_serve("trust-remote-code", "json-output", "logger-level"),
                ),
            ),
        ),
        HostOptions,
        check_shard,
    ),
    Command(
        "print-schema",
        "print the OpenAPI document that a server has at /api-doc/openapi.json",
        (),
        SchemaOptions,
    ),
    Command(
        "chat",
        "talk with a model in the terminal",
        (
            *_client_flags(ChatOptions),
            (
                "Answers",
                (
                    _answer("system", "text", "system message", "none"),
                    _answer("max-tokens", "tokens", "longest answer", "what there is room for"),
                    _answer("temperature", "number", "0: greedy"),
                    _answer("tools", "path", "file with a JSON list of tools", "none"),
                    _answer("color", "toggle", "show thoughts dim, on a terminal"),
                ),
            ),
        ),
        ChatOptions,
        check_chat,
    ),
    Command(
        "bench",
        "measure a server: time to first token, inter-token latency, tokens a second",
        (
            *_client_flags(BenchOptions),
            (
                "Load",
                (
                    _load("clients", "int", "clients at a time; repeatable", many=True),
                    _load("rate", "number", "arrivals a second; repeatable", many=True),
                    _load("requests", "int", "requests of each load"),
                    _load("words", "int", "words of a prompt"),
                    _load("max-tokens", "tokens", "tokens of an answer"),
                    _load("json", "path", "also write the results to this file", "not written"),
                ),
            ),
        ),
        BenchOptions,
        check_bench,
    ),
    Command(
        "batch",
        "ask a server the requests of a file, as OpenAI's Batch API has them",
        (
            *_client_flags(BatchOptions),
            (
                "Requests",
                (
                    _ask("clients", "int", "requests at a time"),
                    _ask("timeout", "seconds", "time until a request has failed"),
                ),
            ),
        ),
        BatchOptions,
        check_batch,
        operand="INPUT OUTPUT",
        operand_field="input",
        operand_help="files: a request on each line, and where the answers go",
        operand_kind="path",
        target_field="output",
    ),
    Command(
        "cluster",
        "keep several servers on the machines of a Ray cluster; other flags are theirs",
        (
            (
                "Cluster",
                (
                    _keep("replicas", "replicas", "servers; LOW:HIGH: as the load asks for", "1"),
                    _keep("replicas-file", "path", "file to write their addresses to, for fronts"),
                    _keep("front-bind", "address", "address of a front for all of them"),
                    _keep("no-front", "switch", "fronts are started by somebody else"),
                    _keep("address", "text", "host:port of the Ray cluster; auto: this machine's"),
                    _keep("replica-cpus", "number", "cores that Ray sets aside for a server"),
                    _keep("replica-gpus", "number", "GPUs that Ray sets aside for a server"),
                    _keep("nodes-per-replica", "int", "machines that its ranks are divided over"),
                ),
            ),
            ("Flags", _of_serve("json-output", "logger-level")),
        ),
        ClusterOptions,
        check_cluster,
        serve_field="server",
    ),
    Command(
        "front",
        "one address for many servers: spreads requests, and goes on where one is lost",
        (
            (
                "Replicas",
                (
                    _spread("replica", "address", "host:port of a replica; repeatable", many=True),
                    _spread("replicas-file", "path", "file of more, one a line; watched", "none"),
                    _spread("replica-timeout", "seconds", "silence after which one is dead"),
                    _spread(
                        "cluster-secret-file",
                        "path",
                        "file of the line that replicas know fronts by: streams then outlive them",
                        "none",
                    ),
                    _spread("max-concurrent-requests", "int", "requests at a time; others get 429"),
                    _spread("known-prefixes", "int", "prompt beginnings that are remembered"),
                ),
            ),
            (
                "Other fronts",
                (
                    _spread("peer", "address", "host:port of another, UDP; repeatable", many=True),
                    _spread(
                        "peer-bind", "address", "host:port (UDP) of this front", "as it serves"
                    ),
                ),
            ),
            (
                "HTTP",
                _of_serve(
                    *("hostname", "port", "bind", "ssl-certfile", "ssl-keyfile"),
                    *("api-key", "api-key-file", "cors-allow-origin", "payload-limit"),
                ),
            ),
            (
                "Operations",
                _of_serve(
                    *("json-output", "logger-level"),
                    *("graceful-termination-timeout", "shutdown-delay"),
                ),
            ),
        ),
        FrontOptions,
        check_front,
    ),
    Command(
        "doctor",
        "say what this machine has, what is missing and what to do",
        (
            (
                "Flags",
                (Flag("port", "int", "port of the server to be", owner=DoctorOptions),),
            ),
        ),
        DoctorOptions,
        check_doctor,
    ),
    Command(
        "completion",
        "print the completion script of a shell: bash, zsh or fish",
        (),
        CompletionOptions,
        operand="SHELL",
        operand_field="shell",
        operand_help="to complete for: bash, zsh or fish",
        operand_kind="shell",
    ),
)

SERVE: Final = COMMANDS[0]


def find_command(name: str) -> Command | None:
    """Return the row of a command; None if there is none."""
    return next((command for command in COMMANDS if command.name == name), None)
