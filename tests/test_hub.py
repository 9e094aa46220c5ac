"""From a name to a folder: embedded, local, and a hub imitated by a small HTTP server.

huggingface_hub reads its environment on import, so each hub case runs in a fresh process.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tgi_trio import demo
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub import check_folder, conversion_command, resolve_model

SHA = "0123456789abcdef0123456789abcdef01234567"
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


class FakeHub(http.server.ThreadingHTTPServer):
    """Serves made-up repositories by the hub's rules; `requests` keeps (path, token)."""

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.requests: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        token = self.headers.get("Authorization")
        path = self.path.split("?")[0].removeprefix("/api/models").removeprefix("/")
        self.server.requests.append((path, token))
        owner, name, *rest = path.split("/")
        repository = f"{owner}/{name}"
        files = self.server.repositories.get(repository)
        if owner == "broken":
            self._error(500, "ServerError")
        elif files is None:
            self._error(401, "RepoNotFound")
        elif owner == "gated" and token != "Bearer secret":
            self._error(403, "GatedRepo")
        elif len(rest) > 1 and rest[0] == "revision" and rest[1] not in ("main", SHA):
            self._error(404, "RevisionNotFound")
        elif rest[:1] == ["resolve"]:
            self._file(files.get("/".join(rest[2:])))
        elif rest[:1] == ["tree"]:
            self._json([
                {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                for path, data in files.items()
            ])  # fmt: skip
        else:
            siblings = [{"rfilename": path} for path in files]
            self._json({"id": repository, "sha": SHA, "siblings": siblings})

    def _file(self, data: bytes | None) -> None:
        if data is None:
            self._error(404, "EntryNotFound")
        else:
            self._answer(200, data, {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": SHA})

    def _json(self, content: object) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    pickled = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    repositories = {"some/tiny": TINY, "gated/tiny": TINY, "some/pickled": pickled}
    with FakeHub(repositories) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


CHILD = """
import json, sys
from pathlib import Path
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub import resolve_model
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
    return subprocess.run(
        [sys.executable, "-c", CHILD, call],
        env={**clean, **home, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


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


@pytest.mark.parametrize(
    ("model", "revision", "told"),
    [
        ("some/missing", None, ("no hub repository some/missing", "HF_TOKEN", "--model-id")),
        ("gated/tiny", None, ("gated/tiny is gated", "HF_TOKEN is not set", "Accept its terms")),
        ("some/tiny", "v9", ("some/tiny has no revision v9", "--revision")),
        ("some/pickled", None, (".bin", "save_pretrained", "some/pickled pickled-safetensors")),
        ("broken/tiny", None, ("does not hold all of broken/tiny", "answered with status 500")),
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
    assert len(done.stderr.strip().splitlines()) == 1


def folder_with(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_local_folder(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config__json="{}", model__safetensors="x")
    assert resolve_model(str(folder)) == folder
    with pytest.raises(ModelLoadError, match="has no revision: leave --revision out"):
        resolve_model(str(folder), "main")


def test_the_embedded_model_needs_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config__json="{}", model__safetensors="x")
    monkeypatch.setattr(demo, "model_path", lambda: folder)
    assert resolve_model(None) == resolve_model(demo.MODEL_ID) == folder


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "a/b/c"])
def test_a_folder_that_is_not_there_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"there is no folder {name}"):
        resolve_model(name)


INDEX = '{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}'


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no config.json"),
        ({"config__json": "{}"}, "holds no weights"),
        (
            {
                "config__json": "{}",
                "m-1__safetensors": "x",
                "model__safetensors__index__json": INDEX,
            },
            "incomplete: .* names m-2.safetensors, which is not there",
        ),
        (
            {"config__json": "{}", "x__safetensors": "x", "model__safetensors__index__json": "[]"},
            "cannot be read as an index",
        ),
    ],
)
def test_folders_that_cannot_be_served(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        check_folder(folder_with(tmp_path, **files))


def test_pickled_weights_name_the_conversion_command(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config__json="{}", pytorch_model__bin="x")
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(str(folder))
    assert conversion_command(str(folder)) in str(caught.value)


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    folder_with(tmp_path, weights__safetensors="x")
    with pytest.raises(ModelLoadError, match="is not a folder"):
        resolve_model(str(tmp_path / "weights.safetensors"))
