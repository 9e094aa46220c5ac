"""Models whose parts lie in several repositories: one folder of links to all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from tests.hub.fake_hub import SHA, FakeHub, running_hub
from tests.hub.test_resolve import NOBODY, fetch
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.resolve import Served, resolve_model, resolve_served
from tgi_trio.model.checkpoint_files import find_safetensors, stored_names
from tgi_trio.model.config import read_config, read_json
from tgi_trio.model.facts import read_model_facts

TEXT = {"model_type": "llama", "hidden_size": 8, "tie_word_embeddings": True, "vocab_size": 16}
TOWER = {"model_type": "whisper", "d_model": 4, "num_mel_bins": 8}
OWN = {
    **{"model_type": "ultravox", "hidden_size": 32, "tie_word_embeddings": False},
    **{"text_model_id": "some/text", "audio_model_id": "some/tower"},
}


def tensors(*names: str) -> dict[str, Any]:
    return {name: np.ones(1, np.float32) for name in names}


TEXT_NAMES = ("model.embed_tokens.weight", "model.norm.weight")
TOWER_NAMES = ("model.encoder.conv1.weight", "model.decoder.embed_tokens.weight")
OWN_NAMES = ("multi_modal_projector.linear_1.weight",)


def files(config: Mapping[str, Any], names: tuple[str, ...], **more: Any) -> dict[str, bytes]:
    said = {f"{name}.json": json.dumps(each).encode() for name, each in more.items()}
    return {
        **{"config.json": json.dumps(config).encode(), "model.safetensors": save(tensors(*names))},
        **said,
    }


REPOSITORIES = {
    "some/whole": files(OWN, OWN_NAMES, tokenizer={"of": "the whole"}),
    "some/text": files(
        TEXT, TEXT_NAMES, tokenizer={"of": "the text"}, generation_config={"eos_token_id": [5, 6]}
    ),
    "some/tower": files(TOWER, TOWER_NAMES, preprocessor_config={"feature_size": 8}),
    "some/gated": files(OWN | {"text_model_id": "gated/text"}, OWN_NAMES),
    "gated/text": files(TEXT, TEXT_NAMES),
    "some/lacking": files(OWN | {"audio_model_id": "some/missing"}, OWN_NAMES),
}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with running_hub(REPOSITORIES) as server:
        yield server


def test_parts_are_downloaded_and_then_found_offline(hub: FakeHub, tmp_path: Path) -> None:
    """A revision is of the model's own repository, and so is the commit that is told."""
    environ = {"XDG_CACHE_HOME": str(tmp_path / "ours")}
    done = fetch(hub.url, tmp_path, "some/whole", SHA, environ=environ)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    names = {each: path.name for each, path in find_safetensors(folder).items()}
    assert {names[each] for each in TEXT_NAMES} == {"text-model.safetensors"}
    assert names[TOWER_NAMES[0]] == "audio-model.safetensors"
    assert names[OWN_NAMES[0]] == "own-model.safetensors"
    assert stored_names(folder) == {*TEXT_NAMES, TOWER_NAMES[0], *OWN_NAMES}
    assert read_json(folder / "tokenizer.json") == {"of": "the whole"}
    assert read_json(folder / "preprocessor_config.json") == {"feature_size": 8}
    config = read_config(folder)
    assert (config.text_type, config.vocab_size, config.eos_ids) == ("llama", 16, (5, 6))
    assert config.get("tie_word_embeddings") is True and config.get("audio_config") == TOWER
    assert (read_json(folder / "config.json") or {})["hidden_size"] == 32
    assert read_model_facts(folder).revision_sha == SHA
    asked = {path for path, _ in hub.requests}
    assert {"some/text/revision/main", "some/tower/revision/main"} < asked
    assert "some/whole/revision/main" not in asked

    for offline in ({}, {"HF_HUB_OFFLINE": "1"}):
        again = fetch(NOBODY, tmp_path, "some/whole", SHA, environ=environ | offline)
        assert (again.returncode, again.stdout) == (0, done.stdout), again.stderr


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            "some/gated",
            ("text_model_id of", "names gated/text, without which it is not whole", "is gated"),
        ),
        ("some/lacking", ("audio_model_id of", "no hub repository some/missing", "HF_TOKEN")),
    ],
)
def test_a_part_that_is_not_to_be_had_is_named(
    hub: FakeHub, tmp_path: Path, model: str, told: tuple[str, ...]
) -> None:
    done = fetch(hub.url, tmp_path, model)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    for words in told:
        assert words in done.stderr


def test_a_part_that_the_cache_lacks_is_named_offline(hub: FakeHub, tmp_path: Path) -> None:
    own = REPOSITORIES["some/whole"]
    with running_hub({"some/whole": own}) as lacking:
        fetch(lacking.url, tmp_path, "some/whole")
    done = fetch(NOBODY, tmp_path, "some/whole", environ={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 1
    assert "names some/text, without which it is not whole: the cache does not" in done.stderr
    assert "HF_HUB_OFFLINE is set" in done.stderr and "download-weights some/text" in done.stderr


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with those of a model and its parts: whole, text, tower."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("whole", "text", "tower"):
        (tmp_path / name).mkdir()
        for file, content in REPOSITORIES[f"some/{name}"].items():
            (tmp_path / name / file).write_bytes(content)
    say(tmp_path, text_model_id=str(tmp_path / "text"), audio_model_id=str(tmp_path / "tower"))
    return tmp_path


def say(parts: Path, folder: str = "whole", **said: Any) -> None:
    """Change a folder's config.json."""
    file = parts / folder / "config.json"
    file.write_text(json.dumps((read_json(file) or {}) | said))


def test_a_folder_is_made_once_and_anew_when_a_part_has_changed(parts: Path) -> None:
    """Its name stands for all files, of which prefixes that are kept depend as well."""
    whole = str(parts / "whole")
    first = resolve_model(whole)
    assert (
        resolve_served(whole) == Served(first)
        and first.parent == parts / "cache" / "tgi_trio" / "composed"
    )
    assert resolve_model(str(first)) == first  # it is whole
    with pytest.raises(ModelLoadError, match="has no revision: leave --revision out"):
        resolve_model(whole, "main")
    for file in ("whole/tokenizer.json", "text/model.safetensors", "tower/model.safetensors"):
        os.utime(parts / file, (1, 1))
        second = resolve_model(whole)
        assert second != first
        first = second
    say(parts, "text", rope_theta=5.0)
    assert resolve_model(whole) != first


def test_a_model_without_a_tokenizer_has_its_text_s(parts: Path) -> None:
    (parts / "whole" / "tokenizer.json").unlink()
    (parts / "whole" / "generation_config.json").write_text('{"eos_token_id": 7}')
    folder = resolve_model(str(parts / "whole"))
    assert read_json(folder / "tokenizer.json") == {"of": "the text"}
    assert read_config(folder).eos_ids == (7,)


def test_a_text_that_is_part_of_a_composite_is_taken_out_of_it(parts: Path) -> None:
    nested = {"hidden_size": 8, "vocab_size": 16}
    file = parts / "text" / "config.json"
    file.write_text(
        json.dumps({"model_type": "gemma3", "text_config": nested, "torch_dtype": "float16"})
    )
    config = read_config(resolve_model(str(parts / "whole")))
    assert (config.text_type, config.dtype) == ("gemma3_text", "float16")


def test_weights_of_the_text_that_the_model_has_itself_are_its_own(parts: Path) -> None:
    """All of them, as of texts that were trained further and merged; some are nobody's."""
    own = tensors(*OWN_NAMES, *(f"language_model.{name}" for name in TEXT_NAMES))
    save_file(own, parts / "whole" / "model.safetensors")
    folder = resolve_model(str(parts / "whole"))
    assert {path.name for path in folder.glob("text-*")} == set()
    assert stored_names(folder) == {*own, TOWER_NAMES[0]}
    del own[f"language_model.{TEXT_NAMES[0]}"]
    save_file(own, parts / "whole" / "model.safetensors")
    with pytest.raises(ModelLoadError, match="has 1 of the 2 tensors of its text, and names"):
        resolve_model(str(parts / "whole"))


def test_what_cannot_be_a_part_is_refused(parts: Path) -> None:
    whole, text = str(parts / "whole"), parts / "text"
    say(parts, text_model_id=7)
    with pytest.raises(ModelLoadError, match="text_model_id 7, which names neither a folder"):
        resolve_model(whole)
    say(parts, text_model_id=str(parts / "nowhere"))
    with pytest.raises(ModelLoadError, match=r"there is no folder .*nowhere: text_model_id of"):
        resolve_model(whole)
    say(parts, text_model_id=whole)
    with pytest.raises(ModelLoadError, match=r"is made of several repositories itself \(ultravox"):
        resolve_model(whole)
    say(parts, text_model_id=str(text))
    (text / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"not whole: .* holds no weights"):
        resolve_model(whole)
    (text / "model-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="holds GGUF, and no weights as safetensors"):
        resolve_model(whole)
    (text / "adapter_config.json").write_text("{}")
    (text / "model-Q8_0.gguf").unlink()
    with pytest.raises(ModelLoadError, match="holds an adapter, and no weights as safetensors"):
        resolve_model(whole)


def test_where_no_folder_can_be_made_another_place_is_named(
    parts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (parts / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(parts / "a file"))
    with pytest.raises(ModelLoadError, match="XDG_CACHE_HOME names another place") as error:
        resolve_model(str(parts / "whole"))
    assert f"composed: Not a directory: {parts / 'a file'}" in str(error.value)
