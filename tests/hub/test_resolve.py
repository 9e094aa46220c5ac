"""From a name to a folder by a hub, imitated by a small HTTP server.

huggingface_hub reads its environment on import, so each hub case runs in a fresh process.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.hub.fake_hub import SHA, FakeHub, running_hub
from tests.support.warm_start import run_warm
from tgi_trio import demo
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.library import import_huggingface_hub
from tgi_trio.hub.repository import hub_token
from tgi_trio.hub.resolve import (
    resolve_adapter,
    resolve_model,
    resolve_tokenizer,
)

TINY = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "consolidated.safetensors": b"a second copy",
    "pytorch_model.bin": b"a third copy",
    "onnx/model.safetensors": b"a fourth copy",
    "modeling_custom.py": b"raise SystemExit",
}


# what lies beside pickles and is not fetched with them
PICKLED = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "training_args.bin": b"a trainer's",
    "optimizer.bin": b"a trainer's",
    "onnx/decoder.bin": b"another format",
    "model.pt": b"the same once more",
}

SEEING = TINY | {
    "config.json": b'{"model_type": "phi4mm"}',
    **{
        f"{kind}-lora/{name}": name.encode()
        for kind in ("vision", "speech", "other")
        for name in ("adapter_config.json", "adapter_model.safetensors", "README.md")
    },
}


def pickled() -> bytes:
    stream = io.BytesIO()
    torch.save({"a": torch.ones(2)}, stream)
    return stream.getvalue()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hostile = {"config.json": b"{}", "pytorch_model.bin": b"cos\nsystem\n."}
    older = {"config.json": b"{}", "model.pt": pickled()}
    repositories = {
        "some/tiny": TINY,
        "some/readme": {"README.md": b"# Nothing"},
        "gated/tiny": TINY,
        "slow/tiny": TINY,
        "some/pickled": PICKLED | {"pytorch_model.bin": pickled()},
        "some/hostile": hostile,
        "some/older": older,
        "some/nothing": {"config.json": b"{}"},
        "some/seeing": SEEING,
    }
    with running_hub(repositories) as server:
        yield server


CHILD = """
import json, sys
from pathlib import Path
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.resolve import resolve_model
call = json.loads(sys.argv[1])
try:
    print(resolve_model(call["model"], call["revision"], cache_dir=Path(call["cache"]),
                        progress=call["progress"], trust_remote_code=call["trust"]))
except ModelLoadError as error:
    sys.exit("ModelLoadError: " + str(error))
"""


def fetch(
    endpoint: str,
    cache: Path,
    model: str = "some/tiny",
    revision: str | None = None,
    progress: bool = False,
    trust: bool = False,
    environ: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    call = json.dumps(dict(model=model, revision=revision, cache=str(cache), progress=progress,
                           trust=trust))  # fmt: skip
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    home = {"HF_HOME": str(cache / "home"), "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1"}
    home |= {"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}  # for this process
    return run_warm("-c", CHILD, call, environment={**clean, **home, **(environ or {})})


ASK = """
import json, sys
from tgi_trio.hub.resolve import read_pipeline_tag
print(read_pipeline_tag(sys.argv[1], None, timeout=float(sys.argv[2])))
"""


def ask(endpoint: str, model: str, timeout: float = 60, **environ: str) -> tuple[str, str]:
    """Return what the hub says of a model, and what is logged."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    home = {"HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1", **environ}
    done = run_warm("-c", ASK, model, str(timeout), environment={**clean, **home})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_what_a_model_is_for_is_asked_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    assert ask(hub.url, "some/tiny", HF_API_TOKEN="secret")[0] == "text2text-generation"
    assert hub.requests == [("some/tiny", "Bearer secret")]
    assert ask(hub.url, "gated/tiny", HF_TOKEN="secret") == ("None", "")
    for model in ("some/missing", "broken/tiny"):
        found, logged = ask(hub.url, model)
        assert found == "None" and f"the hub does not say what {model} is for" in logged
    assert "the hub does not say" in ask(NOBODY, "some/tiny")[1]
    asked = len(hub.requests)
    assert ask(hub.url, "some/tiny", HF_HUB_OFFLINE="1") == ("None", "")
    assert ask(hub.url, str(tmp_path)) == ask(hub.url, demo.MODEL_ID) == ("None", "")
    assert len(hub.requests) == asked


def test_a_hub_that_never_answers_is_not_waited_for(hub: FakeHub) -> None:
    found, logged = ask(hub.url, "slow/tiny", timeout=0.2)
    assert found == "None" and "the hub does not say what slow/tiny is for" in logged


NOBODY = "http://127.0.0.1:9"  # the discard port: refused at once


def test_a_repository_is_downloaded_once_and_then_found_offline(
    hub: FakeHub, tmp_path: Path
) -> None:
    first = fetch(hub.url, tmp_path, progress=True, environ={"HF_TOKEN": "secret"})
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert folder.name == SHA
    wanted = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == wanted
    assert all((folder / name).read_bytes() == TINY[name] for name in wanted)
    assert "100%" in first.stderr  # the progress bar
    assert {token for _, token in hub.requests} == {"Bearer secret"}
    assert {path[:9] for path, _ in hub.requests} == {"some/tiny"}  # and nothing about us

    for environ in ({}, {"HF_HUB_OFFLINE": "1"}):
        again = fetch(NOBODY, tmp_path, environ=environ)
        assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
        assert "%" not in again.stderr


def test_adapters_that_a_model_brings_along_come_with_it(hub: FakeHub, tmp_path: Path) -> None:
    done = fetch(hub.url, tmp_path, "some/seeing")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    below = {str(p.relative_to(folder)) for p in folder.rglob("*/*") if p.is_file()}
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert below == {f"{kind}-lora/{name}" for kind in ("vision", "speech") for name in names}
    again = fetch(NOBODY, tmp_path, "some/seeing")
    assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr


def test_pickles_of_a_repository_are_converted_once(hub: FakeHub, tmp_path: Path) -> None:
    first = fetch(hub.url, tmp_path, "some/pickled")
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    wanted = {"config.json", "tokenizer.json", "pytorch_model.bin", "model.safetensors"}
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == wanted
    assert load_file(folder / "model.safetensors")["a"].tolist() == [1, 1]
    written = (folder / "model.safetensors").stat().st_mtime_ns
    for endpoint, environ in ((hub.url, {}), (NOBODY, {}), (NOBODY, {"HF_HUB_OFFLINE": "1"})):
        again = fetch(endpoint, tmp_path, "some/pickled", environ=environ)
        assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_pickles_with_the_other_extension(hub: FakeHub, tmp_path: Path) -> None:
    done = fetch(hub.url, tmp_path, "some/older")
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").is_file()


def test_half_a_download_is_no_model(hub: FakeHub, tmp_path: Path) -> None:
    folder = Path(fetch(hub.url, tmp_path).stdout.strip())
    (folder / "tokenizer.json").unlink()
    offline = fetch(NOBODY, tmp_path)
    assert offline.returncode == 1
    assert "the cache does not hold all of some/tiny" in offline.stderr
    repaired = fetch(hub.url, tmp_path)
    assert (repaired.returncode, repaired.stdout.strip()) == (0, str(folder))


def test_the_older_token_variable_and_remote_code(hub: FakeHub, tmp_path: Path) -> None:
    done = fetch(
        hub.url, tmp_path, "gated/tiny", trust=True, environ={"HUGGING_FACE_HUB_TOKEN": "secret"}
    )
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "modeling_custom.py").is_file()


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_API_TOKEN"])
def test_a_token_is_read_without_its_line_s_end_and_never_shown(name: str) -> None:
    assert hub_token({"HF_TOKEN": "\n", name: " secret\r\n"}) == "secret"
    assert hub_token({name: "\n"}) is None
    for bad in ("s\u00e9cret", "sec\nret"):
        with pytest.raises(ModelLoadError, match=f"{name} is no token") as error:
            hub_token({name: bad})
        assert bad not in str(error.value)


@pytest.mark.parametrize(
    ("address", "meant"),
    [
        ("https://huggingface.co/some/tiny", ": some/tiny"),
        ("https://huggingface.co/some/tiny/tree/main", ": some/tiny"),
        ("hf.co/some/tiny:Q4_K_M", ": some/tiny:Q4_K_M"),
        ("http://example.com", "(owner/name)"),
    ],
)
def test_an_address_is_told_from_a_name(address: str, meant: str) -> None:
    for resolve in (resolve_model, resolve_tokenizer):
        with pytest.raises(ModelLoadError, match="is an address") as error:
            resolve(address)
        assert str(error.value).endswith(meant)


@pytest.mark.parametrize(
    ("model", "revision", "told"),
    [
        ("some/missing", None, ("no hub repository some/missing", "HF_TOKEN", "--model-id")),
        ("gated/tiny", None, ("gated/tiny is gated", "HF_TOKEN is not set", "Accept its terms")),
        ("some/tiny", "v9", ("some/tiny has no revision v9", "--revision")),
        ("some/hostile", None, ("pytorch_model.bin cannot be converted", "asks for os.system")),
        ("some/nothing", None, ("holds no weights",)),
        ("broken/tiny", None, ("of broken/tiny", "answered with status 500. Try again later")),
        ("status-403/tiny", None, ("answered with status 403. Set HF_TOKEN", "for --model-id")),
        ("status-429/tiny", None, ("answered with status 429. It has been asked too often",)),
        ("cut/off", None, ("downloading cut/off from http", "broke off", "Try again")),
        ("garbage/tiny", None, ("is no answer of a hub", "look at HF_ENDPOINT")),
        ("not a name!", None, ("neither a local folder nor the name", "--model-id")),
    ],
)
def test_what_the_hub_refuses_is_told_in_one_paragraph(
    hub: FakeHub, tmp_path: Path, model: str, revision: str | None, told: tuple[str, ...]
) -> None:
    done = fetch(hub.url, tmp_path, model, revision)
    assert done.returncode == 1
    assert done.stderr.startswith("ModelLoadError: ")
    assert "Traceback" not in done.stderr
    for words in told:
        assert words in done.stderr


def test_a_hub_that_takes_a_question_and_says_nothing_is_given_up(
    hub: FakeHub, tmp_path: Path
) -> None:
    """For good, it was waited for: huggingface_hub sets no limit for lists of files."""
    soon = {"HF_HUB_ETAG_TIMEOUT": "1"}
    done = fetch(hub.url, tmp_path, "silent/tiny", environ=soon)
    assert done.returncode == 1
    assert f"{hub.url} does not answer. Try again later, with a higher HF_HUB_ETAG" in done.stderr


@pytest.mark.parametrize("below", ["a file", "a file/folder"])
def test_where_no_download_can_be_kept_another_place_is_named(
    hub: FakeHub, tmp_path: Path, below: str
) -> None:
    (tmp_path / "a file").write_text("")
    cache = tmp_path / below
    done = fetch(hub.url, cache, environ={"HF_HOME": str(tmp_path / "home")})
    assert done.returncode == 1 and "Errno" not in done.stderr.splitlines()[-1]
    assert f"some/tiny cannot be kept in {cache}: " in done.stderr
    assert "--huggingface-hub-cache, or HF_HUB_CACHE, names another place" in done.stderr


def test_a_repository_without_a_model_is_told(hub: FakeHub, tmp_path: Path) -> None:
    done = fetch(hub.url, tmp_path, "some/readme")
    said = "ModelLoadError: the hub repository some/readme holds none of a model's files"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, said)


@pytest.mark.parametrize(
    ("environ", "why"),
    [({}, f"{NOBODY} cannot be reached"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")],
)
def test_no_network_and_nothing_in_the_cache(
    tmp_path: Path, environ: dict[str, str], why: str
) -> None:
    done = fetch(NOBODY, tmp_path, environ=environ)
    assert done.returncode == 1
    assert done.stderr.startswith("ModelLoadError: the cache does not hold all of some/tiny")
    assert why in done.stderr
    assert "download-weights some/tiny" in done.stderr
    assert "for --model-id, or leave it out to serve the embedded model" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_what_cannot_be_downloaded_is_named_by_its_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters and drafters were said to be for --model-id, which was to be left out."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    readers: list[tuple[Callable[..., object], str]] = [
        (resolve_adapter, "--lora-adapters"),
        (resolve_tokenizer, "--tokenizer-name"),
    ]
    for read, flag in readers:
        with pytest.raises(ModelLoadError, match=f"copy the folder here for {flag}$"):
            read("some/nothing", cache_dir=tmp_path)


@pytest.mark.parametrize(("given", "told"), [(None, False), ("0", True), ("1", False)])
def test_the_hub_is_told_nothing_of_this_machine(
    given: str | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless that is asked for. The variables of the process are as they were."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", given == "1")
    monkeypatch.delenv("HF_HUB_DISABLE_TELEMETRY", raising=False)
    if given is not None:
        monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", given)
    before = dict(os.environ)
    hub = import_huggingface_hub()
    assert dict(os.environ) == before
    assert ("torch/" in hub.utils.build_hf_headers()["user-agent"]) == told


LOG = """
import logging
from tgi_trio.hub.library import import_huggingface_hub
logging.basicConfig()
import_huggingface_hub()
logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")
"""


def test_what_the_library_logs_is_written_once() -> None:
    """By its own handler and by ours, a retry was two lines, of which one was no record."""
    done = run_warm("-c", LOG, environment=dict(os.environ))
    assert done.stderr == "WARNING:huggingface_hub.utils:Retrying in 1s\n"
