"""The files that flags name: keys, and another tokenizer_config.json."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tgi_trio.cli.bench import check_output
from tgi_trio.cli.chat import read_tools
from tgi_trio.cli.files import (
    check_cluster_secret,
    check_files,
    check_key_file,
    check_prefix_folder,
    check_schedule_file,
    check_tokenizer_config,
)
from tgi_trio.cli.options import BenchOptions
from tgi_trio.cli.parser import UsageError, parse
from tgi_trio.client.batch_files import keep_answers, read_ids
from tgi_trio.cluster.replicas_file import read_replicas
from tgi_trio.errors import ConfigurationError
from tgi_trio.process.sockets import check_certificate
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.settings.cluster_secret import read_cluster_secret
from tgi_trio.settings.records import Options
from tgi_trio.shard.quantising.calibration import read_text


@pytest.mark.parametrize("key", ["long,secret", "a, b", " a", ",", "a b", "ä;ö"])
def test_one_variable_is_one_key(key: str) -> None:
    assert parse([], {"API_KEY": key}).options.api_key == (key,)
    assert parse(["--api-key", key], {}).options.api_key == (key,)
    assert parse(["chat"], {"API_KEY": key}).options.api_key == key


@pytest.mark.parametrize("key", ["hush\n", "hush ", "hu\nsh", " ", "hu\x00sh"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(key: str) -> None:
    for words, environ in ([], {"API_KEY": key}), ([f"--api-key={key}"], {}):
        with pytest.raises(UsageError, match="expected a key that a header can carry") as caught:
            parse(words, environ)
        assert "hu" not in str(caught.value)


def test_an_empty_key_counts_as_not_set_and_is_warned_about() -> None:
    invocation = parse([], {"API_KEY": ""})
    assert invocation.options.api_key == ()
    assert "API_KEY is empty, which counts as not set" in invocation.warnings[0]
    assert parse(["--api-key", "a"], {"API_KEY": ""}).warnings == ()


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_everybody_may_read_is_warned_about(
    tmp_path: Path, mode: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("hush\n")
    file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        check_key_file(file)
    assert ("can be read by every user" in caplog.text) is warned
    assert "hush" not in caplog.text


def test_a_tokenizer_config_must_be_there(tmp_path: Path) -> None:
    check_tokenizer_config(None)
    with pytest.raises(ConfigurationError, match=r"--tokenizer-config-path .* No such file"):
        check_tokenizer_config(tmp_path / "nowhere.json")
    with pytest.raises(ConfigurationError, match=r"--tokenizer-config-path .* directory"):
        check_tokenizer_config(tmp_path)
    for text, why in (("{", "it is no JSON"), ("[1]", "must hold a JSON object")):
        (tmp_path / "here.json").write_text(text)
        with pytest.raises(ConfigurationError, match=f"--tokenizer-config-path .* {why}"):
            check_tokenizer_config(tmp_path / "here.json")
    (tmp_path / "here.json").write_text("{}")
    check_tokenizer_config(tmp_path / "here.json")


def test_a_schedule_that_cannot_be_written_is_known_before_a_model_is_loaded(
    tmp_path: Path,
) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "trace"):
        with pytest.raises(ConfigurationError, match=r"^--record-schedule .* cannot be written: "):
            check_schedule_file(path)
    check_schedule_file(None)
    check_schedule_file(tmp_path / "trace")


def test_a_folder_for_prefixes_that_cannot_be_is_known_before_a_model_is_looked_for(
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "folder" / "below"):
        words = f"--prefix-cache-path {path} cannot be used: {file} is no folder"
        with pytest.raises(ConfigurationError, match=f"^{words}$"):
            check_files(Options(prefix_cache_path=path))
    with pytest.raises(ConfigurationError, match=r"cannot be used: File name too long$"):
        check_prefix_folder(tmp_path / ("q" * 300))
    for good in (tmp_path, tmp_path / "new" / "below", Path("new"), None):
        check_prefix_folder(good)
    assert list(tmp_path.iterdir()) == [file]  # nothing is made yet


def test_a_folder_for_prefixes_must_be_open_to_this_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the kernel's answer is given here."""
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(ConfigurationError, match=r"/ cannot be written to by this user$"):
        check_prefix_folder(Path("/nowhere/at-all"))


@pytest.mark.parametrize(
    ("flag", "read"),
    [
        ("--api-key-file", check_key_file),
        ("--tokenizer-config-path", check_tokenizer_config),
        ("--cluster-secret-file", check_cluster_secret),
        ("--record-schedule", check_schedule_file),
        ("--tools", read_tools),
        ("--replicas-file", read_replicas),
        ("--calibration-text", read_text),
    ],
)
def test_what_the_kernel_says_of_a_file_is_said_in_words(
    flag: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    """Not as `[Errno 21] Is a directory: '...'`: the path is there already."""
    with pytest.raises(ConfigurationError, match=rf"^{flag} {tmp_path} .*: Is a directory$"):
        read(tmp_path)


def read_certificate(path: Path) -> None:
    check_certificate(path, None)


def read_template(path: Path) -> None:
    ChatTemplate.from_flag(str(path), {})


@pytest.mark.parametrize(
    "read",
    [
        check_key_file,
        check_tokenizer_config,
        check_cluster_secret,
        read_tools,
        read_replicas,
        read_text,
        read_ids,
        keep_answers,
        read_certificate,
        read_template,
    ],
)
def test_what_has_no_end_is_not_read(read: Callable[[Path], object], tmp_path: Path) -> None:
    """A device would fill the memory, and a pipe would wait for somebody who writes."""
    (tmp_path / "zeros").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("zeros", "pipe"):
        with pytest.raises(
            ConfigurationError, match=r"a device or a pipe|nobody writes to the pipe"
        ):
            read(tmp_path / name)
    with open(tmp_path / "large", "wb") as file:
        file.truncate(10 << 30)  # all of it a hole
    with pytest.raises(ConfigurationError, match=r"(is larger|has more) than (4|256) MiB"):
        read(tmp_path / "large")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "pipe", "zeros"]


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigurationError, match=r"--record-schedule .* cannot be written"):
        check_schedule_file(pipe)
    with pytest.raises(ConfigurationError, match=r"--json .* cannot be written"):
        check_output(BenchOptions(json=pipe))


def test_tools_are_json(tmp_path: Path) -> None:
    (tmp_path / "tools").write_text("[")
    with pytest.raises(ConfigurationError, match=r"--tools .*/tools is no JSON: "):
        read_tools(tmp_path / "tools")


def test_the_secret_of_a_cluster_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(" 0123456789abcdef\n")
    file.chmod(0o600)
    check_cluster_secret(file)
    check_cluster_secret(None)
    assert read_cluster_secret(file) == b"0123456789abcdef"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"hush hush hush hush\xff", "it is no UTF-8"),
        ("hush hush hush hush é".encode(), "must hold one line of printable ASCII"),
        (b"hush hush hush hush\nhush", "must hold one line"),
        (b"hush", "holds 4 characters, a secret has 16 at least"),
    ],
)
def test_a_secret_that_no_header_carries_or_that_is_short_is_an_error(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"--cluster-secret-file .*{message}") as caught:
        check_cluster_secret(file)
    assert "hush" not in str(caught.value)


def test_a_secret_that_everybody_may_read_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "secret"
    file.write_text("hush" * 4)
    file.chmod(0o644)
    check_cluster_secret(file)
    assert "can be read by every user" in caplog.text and "hush" not in caplog.text
