"""The command line: values, precedence, refusals and help."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest

from tests.cli.flag_samples import SAMPLES
from tgi_trio import __version__
from tgi_trio.__main__ import _COMMANDS, _Imported
from tgi_trio.cli.commands import COMMANDS, Command
from tgi_trio.cli.flags import FLAGS, Flag, list_flags
from tgi_trio.cli.foreign import IDLE, REFUSED
from tgi_trio.cli.help import describe_default, serve_help
from tgi_trio.cli.options import BenchOptions, ChatOptions, ClusterOptions, DownloadOptions
from tgi_trio.cli.parser import UsageError, asks_for_json, parse
from tgi_trio.cli.values import KINDS
from tgi_trio.model.config import RopeScaling
from tgi_trio.settings.records import Options

every_flag = pytest.mark.parametrize("flag", list_flags(), ids=lambda flag: flag.name)


def test_flags_and_options_name_the_same_things() -> None:
    names = [flag.field for flag in list_flags()]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(Options))
    foreign = {row.name for row in REFUSED} | {row.name for row in IDLE}
    assert not foreign & {flag.name for flag in list_flags()}
    assert len(foreign) == len(REFUSED) + len(IDLE)
    assert SAMPLES.keys() == KINDS.keys()


@every_flag
def test_every_flag_is_read_from_both_sources(flag: Flag) -> None:
    text, value = SAMPLES[flag.kind]
    words = [f"--{flag.name}"] if flag.kind == "switch" else [f"--{flag.name}", text]
    expected = (value,) if flag.many else value
    assert getattr(parse(words, {}).options, flag.field) == expected
    if not flag.variable:
        assert parse([], {flag.field.upper(): text}).options == Options()
        return
    assert getattr(parse([], {flag.env: text}).options, flag.field) == expected
    assert getattr(parse([], {flag.env: ""}).options, flag.field) == flag.default
    if not flag.secret:
        assert getattr(parse([], {flag.env: " "}).options, flag.field) == flag.default


@every_flag
def test_every_flag_has_one_line_of_help(flag: Flag) -> None:
    lines = [line for line in serve_help().splitlines() if f"--{flag.name} " in line]
    assert len(lines) == 1
    assert (f"[{flag.env}]" in lines[0]) == flag.variable
    assert f"(={describe_default(flag)})" in lines[0]
    assert flag.default is not None or flag.unset


def test_the_kernels_were_called_after_their_first_compiler() -> None:
    assert parse(["--cpu-backend", "numba"], {}).options.cpu_backend == "kernels"
    assert parse([], {"CPU_BACKEND": "numba"}).options.cpu_backend == "kernels"


def test_help_is_grouped_and_version_is_told() -> None:
    text = parse(["--help"], {}).text
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == ["Commands", *(group for group, _ in FLAGS)]
    assert parse(["serve", "-h"], {}).text == text
    assert "MODEL" in parse(["download-weights", "--help"], {}).text
    assert parse(["--version"], {}).text == f"tgi-trio {__version__}\n"


def test_a_flag_wins_over_the_environment() -> None:
    environ = {"PORT": "1", "JSON_OUTPUT": "true", "CORS_ALLOW_ORIGIN": "a, b"}
    options = parse(
        ["-p", "2", "--cors-allow-origin", "c", "--cors-allow-origin=d"], environ
    ).options
    assert (options.port, options.json_output, options.cors_allow_origin) == (2, True, ("c", "d"))
    assert parse([], environ).options.cors_allow_origin == ("a", "b")


def test_the_port_of_vertex_ai_wins_unless_addresses_are_named() -> None:
    environ = {"AIP_HTTP_PORT": "8080"}
    assert parse(["--port", "1"], environ).options.addresses == ("0.0.0.0:8080",)
    assert parse(["--bind", "1.2.3.4:5"], environ).options.addresses == ("1.2.3.4:5",)


def test_hostname_of_a_container_is_not_an_address() -> None:
    invocation = parse([], {"HOSTNAME": "web-7f9c"})
    assert invocation.options.hostname == "0.0.0.0"
    assert len(invocation.warnings) == 1
    assert "HOSTNAME=web-7f9c" in invocation.warnings[0]
    assert parse(["--hostname", "::1"], {"HOSTNAME": "web-7f9c"}).warnings == ()
    assert parse([], {"HOSTNAME": "10.0.0.1"}).options.hostname == "10.0.0.1"
    with pytest.raises(UsageError, match="`hostname` must be an IP address"):
        parse(["--hostname", "web-7f9c"], {})


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        (["--port", "x"], {}, "--port: expected a whole number, got 'x'"),
        ([], {"PORT": "tcp://1"}, "environment variable PORT: expected a whole number"),
        (["--port", "٣.5"], {}, "expected a whole number"),
        (["--max-queued-tokens", "9223372036854775808"], {}, f"a whole number of {2**63 - 1} at"),
        (
            ["--cuda-graphs", "1" * 5000],
            {},
            f"expected sizes such as 1,2,4,8, or 0 for none, got '{'1' * 200}...'",
        ),
        (["--max-queued-tokens", "1" * 5000], {}, "expected a whole number of 92233720368547758"),
        (["--port"], {}, "--port.*expected one argument"),
        (["--port", "1", "--port", "2"], {}, "--port is given 2 times"),
        (["--port", "99999"], {}, "`port` must be <= 65535"),
        ([], {"AIP_HTTP_PORT": "99999"}, "`aip_http_port` must be <= 65535"),
        ([], {"AIP_PREDICT_ROUTE": "predict"}, "AIP_PREDICT_ROUTE: expected a path such as"),
        (["--aip-health-route", "/<x>"], {}, "--aip-health-route: expected a path such as"),
        (["--waiting-served-ratio", "nan"], {}, "--waiting-served-ratio: expected a number of at"),
        (["--waiting-served-ratio", "-1"], {}, "expected a number of at least 0, got '-1'"),
        (["--watermark-gamma", "2"], {}, "expected a number from 0 to 1, got '2'"),
        ([], {"CUDA_MEMORY_FRACTION": "x"}, "CUDA_MEMORY_FRACTION: expected a number from 0 to 1"),
        (["--watermark-delta", "x"], {}, "--watermark-delta: expected a number, got 'x'"),
        (
            ["--quantize", "int3"],
            {},
            "--quantize: expected one of awq, compressed-tensors, .*: eetq makes 8-bit",
        ),
        (["--dtype", "int4"], {}, "--dtype: expected one of float32, bfloat16, float16"),
        (["--sharded", "maybe"], {}, "--sharded: expected true or false"),
        ([], {"JSON_OUTPUT": "ja"}, "variable JSON_OUTPUT: expected true or false"),
        (["--max-inptu-tokens", "3"], {}, "did you mean --max-input-tokens"),
        (["--zzz"], {}, "--zzz is not a flag of serve: see --help"),
        (["--max-input-tok", "3"], {}, "not a flag"),  # no abbreviations: they would change meaning
        (["gpt2"], {}, "unknown command 'gpt2': there are serve, .* with `serve gpt2`"),
        (["serve", "a", "b"], {}, "'b' is not a flag of serve: it takes one MODEL"),
        (["serve", "a", "--model-id", "a"], {}, "the MODEL is given twice: as 'a' and with --mod"),
        (["serve", ""], {}, "MODEL: expected a hub repository or a local folder, got ''"),
        (["--model-id", ""], {}, "--model-id: expected a hub repository or a local folder"),
        (["--model-id= "], {}, "--model-id: expected a hub repository or a local folder"),
        (["--tokenizer-config-path", ""], {}, "--tokenizer-config-path: expected a path"),
        (["--served-model-name", "\udcff"], {}, "--served-model-name: expected UTF-8, got "),
        (["--model-id", "a/\udcff"], {}, "--model-id: expected UTF-8, got "),
        (["--cors-allow-origin", "http://\u4f8b.jp"], {}, "expected an origin as browsers send it"),
        ([], {"CORS_ALLOW_ORIGIN": "a b"}, "CORS_ALLOW_ORIGIN: expected an origin as browsers"),
        (["--otlp-endpoint", "http://a:99999"], {}, "--otlp-endpoint: expected http://host:port"),
        (["--otlp-endpoint", "http://me:key@a:4317"], {}, "--otlp-endpoint: expected http://host:"),
        (["--otlp-service-name", " "], {}, "--otlp-service-name: expected a text that is not em"),
        (["doctor", "x"], {}, "'x' is not a flag of doctor"),
        (["bench", "http://h:1"], {}, "is not a flag of bench: the server is given with --url"),
        (["completion", "tcsh"], {}, "SHELL: expected one of bash, zsh, fish, got 'tcsh'"),
        (["--json-output=maybe"], {}, "--json-output: expected true or false, got 'maybe'"),
        (["--logger-level", "loud"], {}, "--logger-level: expected off, error, .* got 'loud'"),
        (["download-weights"], {}, "needs the MODEL"),
        (
            ["download-weights", "a/b", "--port", "3"],
            {},
            "--port is not a flag of download-weights",
        ),
        (["--sharded", "true"], {}, "over how many ranks"),
        (["--api-key", ""], {}, "--api-key: expected a key"),
        (["--bind", "3000"], {}, "--bind: expected host:port, .* got '3000'"),
        (["--bind", "::1"], {}, "--bind: expected host:port"),
        (["--bind", "a:70000"], {}, "--bind: expected host:port"),
        (["--bind", "unix:"], {}, "--bind: expected host:port"),
        ([], {"BIND": "127.0.0.1:1,x"}, "variable BIND: expected host:port"),
    ],
)
def test_mistakes_are_one_clear_sentence(
    words: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(words, environ)
    assert "\n" not in str(caught.value)


def test_download_weights() -> None:
    invocation = parse(["download-weights", "a/b", "--revision", "r"], {"QUANTIZE": "awq"})
    assert invocation.command == "download-weights"
    assert invocation.options == DownloadOptions(model_id="a/b", revision="r")
    # as TGI's launcher starts it
    words = "download-weights a/b --extension .safetensors --logger-level INFO --json-output"
    words += " --merge-lora --adapter-tokenizers base --trust-remote-code"
    options = parse(words.split(), {}).options
    assert options == DownloadOptions(
        model_id="a/b",
        merge_lora=True,
        adapter_tokenizers="base",
        json_output=True,
        trust_remote_code=True,
        logger_level="INFO",
    )
    for flag, wanted in (("--auto-convert", True), ("--no-auto-convert", False)):
        assert parse(["download-weights", flag, "a/b"], {}).options.auto_convert is wanted
    for mistake, told in (
        (["--extension", ".gguf"], r"--extension: expected one of \.safetensors, \.bin, \.pt"),
        (["--logger-level", "loud"], "--logger-level: expected "),
        (["--auto-convert", "--no-auto-convert"], "--auto-convert is given 2 times"),
        (["--no-auto-convrt"], "did you mean --no-auto-convert"),
    ):
        with pytest.raises(UsageError, match=told):
            parse(["download-weights", "a/b", *mistake], {})


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_its_help_and_its_program(command: Command) -> None:
    text = parse([command.name, "--help"], {}).text
    assert f"  {command.usage} " in serve_help()
    assert all(f"--{flag.name} " in text for flag in command.flags)
    fields = {field.name for field in dataclasses.fields(command.options)}
    operands = {command.operand_field, command.target_field, command.serve_field} - {""}
    wanted = {flag.field for flag in command.flags} | operands
    # those of serve's dataclass take the fields they need
    assert wanted <= fields if command.options is Options else wanted == fields
    assert command.name in _COMMANDS


@pytest.mark.parametrize(
    ("name", "row"), [(k, v) for k, v in _COMMANDS.items() if isinstance(v, _Imported)]
)
def test_every_row_names_a_function_of_its_commands_options(name: str, row: _Imported) -> None:
    """It is looked up by name, which no type checker sees."""
    (command,) = (each for each in COMMANDS if each.name == name)
    assert get_type_hints(row.find()) == {"options": command.options, "return": int}


def test_other_flags_of_a_cluster_are_its_servers() -> None:
    words = ["--num-shard", "64", "org/name", "--speculate=2", "--trust-remote-code"]
    options = parse(["cluster", "--replicas", "2:8", "--replica-gpus", "64", *words], {}).options
    assert options == ClusterOptions(replicas=(2, 8), replica_gpus=64.0, server=tuple(words))
    assert parse(["cluster", "--replicas", "3"], {}).options.replicas == (3, 3)
    for mistake, told in (
        (["--replicas", "8:2"], "--replicas: expected a number such as 2, or two such as 2:8"),
        (["--replicas", "2:"], "the lower one first, got '2:'"),
        (["--replicas", "0"], "the lower one first, got '0'"),
        (["--bogus"], "--bogus is not a flag of serve"),
        (["a/b", "c/d"], "'c/d' is not a flag of serve"),
        (["--num-shard", "x"], "--num-shard: expected a whole number, got 'x'"),
        (["--disable-custom-kernels"], "--disable-custom-kernels cannot be used"),
        (["--port", "80"], "--port is not for servers of a cluster"),
        (["--ssl-certfile=x"], "--ssl-certfile is not for servers of a cluster"),
    ):
        with pytest.raises(UsageError, match=told):
            parse(["cluster", *mistake], {})


@pytest.mark.parametrize("words", [["serve", "a/b"], ["a/b"], ["--port", "1", "a/b", "-e"]])
def test_the_model_may_be_a_word_of_its_own(words: list[str]) -> None:
    wanted = {"serve": words, "a/b": words, "--port": ["serve", *words]}[words[0]]
    assert parse(wanted, {"MODEL_ID": "c/d"}).options.model_id == "a/b"


def test_a_path_needs_no_command() -> None:
    for path in ("./m", "~/m", ".", "/models/m"):
        assert parse([path, "--port", "7"], {}).options == Options(model_id=path, port=7)


def test_switches_take_a_truth_value() -> None:
    environ = {"JSON_OUTPUT": "on"}
    for words, expected in (
        (["--json-output"], True),
        (["--json-output=no"], False),
        (["--json-output", "FALSE"], False),
        (["--json-output", "1"], True),
        ([], True),
    ):
        assert parse(words, environ).options.json_output is expected, words
    assert parse(["--json-output", "a/b"], {}).options == Options(json_output=True, model_id="a/b")


def test_whether_mistakes_are_told_as_json() -> None:
    assert asks_for_json(["--zzz", "--json-output"], {})
    assert asks_for_json([], {"JSON_OUTPUT": "1"})
    assert not asks_for_json(["--json-output=false"], {"JSON_OUTPUT": "1"})
    assert not asks_for_json(["--json-output=x"], {"JSON_OUTPUT": "x"})


@pytest.mark.parametrize(
    "text", ["info,text_generation_router=debug", "text_generation_launcher=info", "TRACE", "off"]
)
def test_log_level_in_the_forms_of_tgi(text: str) -> None:
    invocation = parse([], {"LOG_LEVEL": text})
    assert (invocation.options.logger_level, invocation.warnings) == (text, ())
    assert parse(["--logger-level", text], {"LOG_LEVEL": "warn"}).options.logger_level == text


def test_a_log_level_that_is_none_is_warned_about() -> None:
    invocation = parse([], {"LOG_LEVEL": "loud"})
    assert invocation.options == Options()
    assert len(invocation.warnings) == 1
    assert "LOG_LEVEL: expected off, error, " in invocation.warnings[0]
    assert "got 'loud': logging at info" in invocation.warnings[0]
    assert parse([], {"LOG_LEVEL": ""}) == parse([], {})


def test_quantize_takes_a_model_and_a_folder() -> None:
    options = parse(["quantize", "a", "b", "--groupsize", "64", "--act-order"], {}).options
    assert (options.model_id, options.output) == ("a", Path("b"))
    assert (options.groupsize, options.act_order, options.format) == (64, True, "gptq")
    for words in ([], ["a"]):
        with pytest.raises(UsageError, match="quantize needs the MODEL OUTPUT"):
            parse(["quantize", *words], {})
    with pytest.raises(UsageError, match="'c' is not a flag of quantize"):
        parse(["quantize", "a", "b", "c"], {})
    with pytest.raises(UsageError, match="--format: expected one of gptq, gguf:q4_0, gguf:q8_0"):
        parse(["quantize", "a", "b", "--format", "awq"], {})


def test_flags_of_the_clients() -> None:
    options = parse(["bench", "--clients", "2", "--clients=4", "--url", "h:1"], {}).options
    assert options == BenchOptions(clients=(2, 4), url="h:1")
    assert parse(["chat", "--max-tokens", "3"], {"API_KEY": "k", "MAX_TOKENS": "9"}).options == (
        ChatOptions(max_tokens=3, api_key="k")
    )
    assert parse(["bench"], {"REQUESTS": "9", "RATE": "x"}).options == BenchOptions()
    # As the help shows the default.
    assert parse(["bench", "--clients", "1,8", "--clients", "32"], {}).options.clients == (1, 8, 32)
    assert parse(["bench", "--rate=0.5,2"], {}).options.rate == (0.5, 2.0)
    with pytest.raises(UsageError, match="--clients: expected a whole number, got 'x'"):
        parse(["bench", "--clients", "1,x"], {})
    with pytest.raises(UsageError, match="--url: expected http://host:port"):
        parse(["chat", "--url", "ftp://"], {})
    with pytest.raises(UsageError, match="completion needs the SHELL"):
        parse(["completion"], {})


# Every flag of TGI's launcher, router and model server, by their reference.
TGI_FLAGS = """
model-id revision validation-workers sharded num-shard quantize speculate dtype kv-cache-dtype
trust-remote-code max-concurrent-requests max-best-of max-stop-sequences max-top-n-tokens
max-input-tokens max-input-length max-total-tokens waiting-served-ratio max-batch-prefill-tokens
max-batch-total-tokens max-waiting-tokens max-batch-size cuda-graphs hostname port prometheus-port
shard-uds-path master-addr master-port huggingface-hub-cache weights-cache-override
disable-custom-kernels cuda-memory-fraction rope-scaling rope-factor json-output otlp-endpoint
otlp-service-name cors-allow-origin api-key watermark-gamma watermark-delta ngrok ngrok-authtoken
ngrok-edge tokenizer-config-path disable-grammar-support env max-client-batch-size lora-adapters
usage-stats payload-limit enable-prefill-logprobs graceful-termination-timeout tokenizer-name
master-shard-uds-path messages-api-enabled uds-path logger-level
""".split()


def test_no_flag_of_tgi_is_ignored() -> None:
    theirs = {row.name for row in REFUSED} | {row.name for row in IDLE}
    known = {flag.name for flag in list_flags()} | theirs
    assert set(TGI_FLAGS) <= known


@pytest.mark.parametrize("entry", ["", "a=b=c", "a@b@c", "=b", "a=", "a@"])
def test_adapters_are_read_as_tgi_reads_them(entry: str) -> None:
    with pytest.raises(UsageError, match=f"Invalid LoRA adapter format: {entry}"):
        parse(["--lora-adapters", f"x,{entry}"], {})


def test_rotary_scaling() -> None:
    """As TGI has it: a factor alone is linear, a kind alone changes nothing."""
    assert parse([], {}).options.rope is None
    assert parse(["--rope-factor", "2.5"], {}).options.rope == RopeScaling("linear", 2.5)
    assert parse(["--rope-scaling=dynamic"], {}).options.rope == RopeScaling("dynamic", 1.0)
    both = {"ROPE_SCALING": "dynamic", "ROPE_FACTOR": "4"}
    assert parse([], both).options.rope == RopeScaling("dynamic", 4.0)
    with pytest.raises(UsageError, match="--rope-scaling: expected one of linear, dynamic"):
        parse(["--rope-scaling", "yarn"], {})
    assert parse(["--rope-factor", "1000"], {}).options.rope == RopeScaling("linear", 1000)
    for wrong in ("0.5", "1000.1", "1e30"):  # 1e30 was an OverflowError, 1e9 a start without end
        with pytest.raises(UsageError, match="--rope-factor: expected a number from 1 to 1000"):
            parse(["--rope-factor", wrong], {})


def test_sizes_of_cuda_graphs() -> None:
    assert parse(["--cuda-graphs", "0"], {}).options.cuda_graphs == ()
    assert parse([], {"CUDA_GRAPHS": "4"}).options.cuda_graphs == (4,)
    assert parse(["--cuda-graphs", "0,1,-2,4"], {}).options.cuda_graphs == (1, 4)
    for text in ("x", "1,", "1.5"):
        with pytest.raises(UsageError, match="expected sizes such as 1,2,4,8"):
            parse([f"--cuda-graphs={text}"], {})
    with pytest.raises(UsageError, match="`cuda_memory_fraction` must be > 0 and <= 1"):
        parse(["--cuda-memory-fraction", "0"], {})


def test_defaults_are_tgis() -> None:
    options = parse([], {}).options
    assert (options.max_concurrent_requests, options.max_best_of) == (128, 2)
    assert (options.max_stop_sequences, options.max_top_n_tokens) == (4, 5)
    assert (options.waiting_served_ratio, options.max_waiting_tokens) == (0.3, 20)
    assert (options.hostname, options.port) == ("0.0.0.0", 3000)
    assert (options.max_client_batch_size, options.payload_limit) == (4, 2_000_000)
    assert options.graceful_termination_timeout == 90
    assert options.validation_workers == 2
