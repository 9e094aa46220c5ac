"""Which GGUF file is meant: by its name, in a folder, in a repository of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.fake_hub import SHA, FakeHub, running_hub
from tests.hub.test_folders import POINTER
from tests.hub.test_resolve import NOBODY, fetch
from tests.support.gguf_files import write_llama, write_parts
from tgi_trio import demo
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.gguf import choose, split_choice
from tgi_trio.hub.resolve import resolve_model
from tgi_trio.model.facts import read_model_facts

NAMES = [
    "Model-0.5B-Q4_K_M.gguf",
    "Model-0.5B-q8_0.gguf",
    "Model-0.5B-Q4_K.gguf",
    "Model-0.5B-F16.gguf",
    "Q2_K/Model-0.5B-Q2_K-00001-of-00002.gguf",
    "Q2_K/Model-0.5B-Q2_K-00002-of-00002.gguf",
    "mmproj-Model-F16.gguf",
    "Model.imatrix.gguf",
    "README.md",
]


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ("Q4_K_M", NAMES[0]),
        ("q4_k_m", NAMES[0]),
        ("Q8_0", NAMES[1]),
        ("Q4_K", NAMES[2]),
        ("F16", NAMES[3]),
        ("Q2_K", NAMES[4]),
        ("Model-0.5B-F16.gguf", NAMES[3]),
        (NAMES[4], NAMES[4]),
        ("0.5B-Q4_K", NAMES[2]),
    ],
)
def test_a_choice_is_a_word_at_the_end_of_a_name(choice: str, found: str) -> None:
    assert choose(NAMES, choice, "some/model", "--model-id") == found


@pytest.mark.parametrize(
    "choice", ["Q6_K", "K_M", "4_K", "Q4", "README.md", "mmproj-Model-F16.gguf"]
)
def test_what_is_no_choice_is_answered_with_those_there_are(choice: str) -> None:
    with pytest.raises(ModelLoadError) as error:
        choose(NAMES, choice, "some/model", "--model-id")
    text = str(error.value)
    assert f"no GGUF files for '{choice}'" in text and "Q2_K-00001-of-00002" in text
    assert (
        "mmproj" not in text.split("There are")[1] and "00002-of" not in text.split("There are")[1]
    )


def test_a_name_is_told_from_a_choice(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    assert split_choice("some/model:Q4_K_M", "--model-id") == ("some/model", "Q4_K_M")
    for whole in ("some/model", str(tmp_path / "a:b"), "some/model:", ":Q4"):
        assert split_choice(whole, "--model-id") == (whole, "")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_pointer_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_text(POINTER)
    for place in (file, tmp_path):
        with pytest.raises(
            ModelLoadError, match=r"pointers of Git LFS in their place: model-Q4_K_M\.gguf"
        ):
            resolve_model(str(place))


def test_files_and_folders(home: Path) -> None:
    models = home / "models"
    models.mkdir()
    first = write_llama(demo.model_path(), models / "one-F32.gguf")
    folder = resolve_model(str(first))
    assert (folder / "one-F32.gguf").resolve() == first.resolve()
    assert folder.is_relative_to(home / "cache")
    assert resolve_model(str(models)) == folder
    write_llama(demo.model_path(), models / "one-Q8_0.gguf", quantised=True)
    with pytest.raises(ModelLoadError, match=r"several GGUF files.*one-F32\.gguf, one-Q8_0\.gguf"):
        resolve_model(str(models))
    assert resolve_model(f"{models}:F32") == folder
    with pytest.raises(ModelLoadError, match="one file, so 'F32' chooses nothing"):
        resolve_model(f"{first}:F32")
    with pytest.raises(ModelLoadError, match="no revision"):
        resolve_model(str(first), "main")


def test_safetensors_come_before_gguf_beside_them(home: Path) -> None:
    folder = home / "both"
    folder.mkdir()
    for path in demo.model_path().iterdir():
        (folder / path.name).symlink_to(path)
    write_llama(demo.model_path(), folder / "model.gguf")
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(100)])
def test_a_damaged_file_is_refused_by_its_name(home: Path, content: bytes) -> None:
    (home / "model.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.gguf cannot be read as GGUF"):
        resolve_model(str(home / "model.gguf"))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    (tmp_path / "files").mkdir()
    whole = write_llama(demo.model_path(), tmp_path / "files/whole.gguf").read_bytes()
    parts = write_parts(demo.model_path(), tmp_path / "files", 2)
    files = {
        "README.md": b"a model",
        "tiny-F32.gguf": whole,
        "tiny-Q2_K.gguf": b"not this one",
        **{f"F16/tiny-F16{path.name[5:]}": path.read_bytes() for path in parts},
    }
    repositories = {
        "some/gguf": files,
        "some/alone": {"only.gguf": whole},
        "some/nothing": {"config.json": b"{}"},
    }
    with running_hub(repositories) as server:
        yield server


def fetched(hub: FakeHub) -> set[str]:
    return {path.partition(f"/resolve/{SHA}/")[2] for path, _ in hub.requests} - {""}


def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_only_the_chosen_file_is_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    done = fetch(hub.url, tmp_path, "some/gguf:f32", environ=environ(tmp_path))
    assert done.returncode == 0, done.stderr
    assert fetched(hub) == {"tiny-F32.gguf"}
    folder = Path(done.stdout.strip())
    assert (folder / "tiny-F32.gguf").is_file()
    assert read_model_facts(folder).revision_sha == SHA
    again = fetch(NOBODY, tmp_path, "some/gguf:F32", environ=environ(tmp_path))
    assert again.stdout == done.stdout, again.stderr
    offline = {"HF_HUB_OFFLINE": "1"} | environ(tmp_path)
    assert fetch(NOBODY, tmp_path, "some/gguf:F32", environ=offline).stdout == done.stdout


def test_all_parts_of_a_split_file_are_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    done = fetch(hub.url, tmp_path, "some/gguf:F16", environ=environ(tmp_path))
    assert done.returncode == 0, done.stderr
    assert fetched(hub) == {f"F16/tiny-F16-0000{n}-of-00002.gguf" for n in (1, 2)}
    assert len(list(Path(done.stdout.strip()).glob("*.gguf"))) == 2


def test_the_only_file_needs_no_choice(hub: FakeHub, tmp_path: Path) -> None:
    done = fetch(hub.url, tmp_path, "some/alone", environ=environ(tmp_path))
    assert done.returncode == 0 and "only.gguf" in fetched(hub), done.stderr


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("some/gguf", "several GGUF files"),
        ("some/gguf:Q6_K", "no GGUF files for 'Q6_K'"),
        ("some/nothing:Q4_K_M", "holds no .gguf file"),
        ("some/missing:Q4_K_M", "there is no hub repository some/missing"),
        ("some/gguf:Q2_K", "cannot be read as GGUF"),
    ],
)
def test_what_cannot_be_chosen_is_said(
    hub: FakeHub, tmp_path: Path, model: str, reason: str
) -> None:
    done = fetch(hub.url, tmp_path, model, environ=environ(tmp_path))
    assert "ModelLoadError" in done.stderr and reason in done.stderr
