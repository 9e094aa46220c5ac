"""Tokenizers of a model's folder: what its files say, and older formats."""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from tests.router.text.kinds import (
    byte_level,
    save,
    sentencepiece,
    wordpiece,
)
from tgi_trio import demo
from tgi_trio.errors import ModelLoadError
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tokenizer import Tokenizer


class TestFromFolder:
    def test_named_tokens_come_as_strings_or_objects(self, tmp_path: Path) -> None:
        eos = {"content": "</s>", "lstrip": False}
        folder = save(byte_level(), tmp_path, bos_token="<s>", eos_token=eos, pad_token=None)
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}

    def test_tokens_the_configuration_calls_special_are(self, tmp_path: Path) -> None:
        """Some folders mark the end-of-turn token only in tokenizer_config.json."""
        backend = byte_level()
        backend.add_tokens(["<|end|>", "<|extra|>", "<|late|>"])
        late = {"content": "<|late|>", "special": True}
        folder = save(
            backend,
            tmp_path,
            eos_token="<|end|>",
            additional_special_tokens=["<|extra|>"],
            added_tokens_decoder={"424": late},
        )
        tokenizer = Tokenizer.from_folder(folder)
        ids = tokenizer.encode_ids("a<|end|><|extra|><|late|>")
        assert tokenizer.decode(ids) == "a"

    def test_tokens_only_the_configuration_knows_are_added(self, tmp_path: Path) -> None:
        backend = byte_level()
        size = backend.get_vocab_size()
        folder = save(
            backend,
            tmp_path,
            eos_token="<|nowhere|>",  # no id of the model stands for it: not added
            added_tokens_decoder={str(size): {"content": "<|new|>", "special": True}},
        )
        tokenizer = Tokenizer.from_folder(folder)
        assert tokenizer.encode_ids("<|new|>").tolist() == [size]
        assert tokenizer.vocab_size == size + 1

    @pytest.mark.parametrize("nested", [False, True])
    def test_bos_and_eos_by_the_ids_of_the_model(self, tmp_path: Path, nested: bool) -> None:
        backend = byte_level()
        folder = save(backend, tmp_path)
        ids = {name: backend.token_to_id(name) for name in ("<s>", "</s>")}
        model = {"bos_token_id": ids["<s>"], "eos_token_id": [ids["</s>"], 3]}
        config = {"text_config": model} if nested else model
        (folder / "config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.from_folder(folder)
        named = [tokenizer.special_tokens[name] for name in ("bos_token", "eos_token")]
        assert named == ["<s>", "</s>"]

    def test_agrees_with_transformers(self, tmp_path: Path) -> None:
        transformers = pytest.importorskip("transformers")
        folder = save(
            sentencepiece(),
            tmp_path,
            tokenizer_class="PreTrainedTokenizerFast",
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            additional_special_tokens=["<|user|>"],
        )
        ours, theirs = (
            Tokenizer.from_folder(folder),
            transformers.AutoTokenizer.from_pretrained(folder),
        )
        text = "Hello <|user|>, naïve 😀 日本語</s>"
        ids = ours.encode_ids(text)
        assert ids.tolist() == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert set(theirs.all_special_ids) <= ours.special_ids
        assert ours.special_tokens == theirs.special_tokens_map

    @pytest.mark.parametrize("key", ["named", "extra", "older"])
    def test_tokens_with_roles_of_one_model_agree_with_transformers(
        self, tmp_path: Path, key: str
    ) -> None:
        """Templates write them by name, as `{{ image_token }}`, and answers come without them."""
        transformers = pytest.importorskip("transformers")
        backend = byte_level()
        backend.add_tokens(["<image>"])
        named: dict[str, Any] = {"image_token": "<image>", "spare_token": "<s>"}
        folder = save(
            backend,
            tmp_path,
            tokenizer_class="PreTrainedTokenizerFast",
            eos_token="</s>",
            add_bos_token=True,  # the name of no token
            **({"extra_special_tokens": named} if key == "extra" else {}),
            **(named if key == "named" else {}),
        )
        if key == "older":
            (folder / "special_tokens_map.json").write_text(json.dumps(named))
        ours = Tokenizer.from_folder(folder)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert ours.special_tokens == theirs.special_tokens_map
        assert set(theirs.all_special_ids) <= ours.special_ids
        template = ChatTemplate(
            {"default": "{{ image_token }}{{ spare_token }}"}, ours.special_tokens
        )
        assert template.render([{"role": "user", "content": ""}]) == "<image><s>"
        ids = ours.encode_ids("a<image>b")
        assert ids.tolist() == theirs("a<image>b")["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "ab"

    @pytest.mark.parametrize("listed", [True, False])
    @pytest.mark.parametrize("special", [True, False])
    @pytest.mark.parametrize("file", ["added_tokens.json", "special_tokens_map.json"])
    def test_older_files_add_tokens_where_no_newer_lists_them(
        self, tmp_path: Path, file: str, special: bool, listed: bool
    ) -> None:
        transformers = pytest.importorskip("transformers")
        backend = byte_level()
        entry = {"content": "</s>", "special": True}
        folder = save(
            backend,
            tmp_path,
            tokenizer_class="PreTrainedTokenizerFast",
            eos_token="</s>",
            **({"extra_special_tokens": ["<later>"]} if special else {}),
            **({"added_tokens_decoder": {backend.token_to_id("</s>"): entry}} if listed else {}),
        )
        size = backend.get_vocab_size()
        ids = {"<later>": size + 1, "<own>": size}
        content = ids if file == "added_tokens.json" else {"extra_special_tokens": list(ids)}
        (folder / file).write_text(json.dumps(content))
        ours = Tokenizer.from_folder(folder)
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        for text in ("a<own>b <later> c", " <later>", "<own><own>"):
            found = ours.encode_ids(text).tolist()
            assert found == theirs(text)["input_ids"]
            assert ours.decode(found) == theirs.decode(found, skip_special_tokens=True)

    def test_an_id_that_is_no_number_is_named(self, tmp_path: Path) -> None:
        (save(byte_level(), tmp_path) / "added_tokens.json").write_text('{"<own>": "1"}')
        with pytest.raises(
            ModelLoadError, match=r"added_tokens\.json has '1' for the id of '<own>'"
        ):
            Tokenizer.from_folder(tmp_path)

    def test_a_folder_without_tokenizer_names_the_flag(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match="--model-id"):
            Tokenizer.from_folder(tmp_path)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    @pytest.mark.parametrize("content", ["{", "[]"])
    def test_a_broken_file_is_named(self, tmp_path: Path, name: str, content: str) -> None:
        save(byte_level(), tmp_path)
        (tmp_path / name).write_text(content)
        with pytest.raises(ModelLoadError, match=name):
            Tokenizer.from_folder(tmp_path)

    def test_an_older_format_is_converted_once_in_another_process(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, cache = tmp_path / "model", tmp_path / "cache"
        folder.mkdir()
        vocabulary = wordpiece().get_vocab()
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *vocabulary]
        (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(words)))
        (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "BertTokenizer", "unk_token": "[UNK]"})
        )
        tokenizer = Tokenizer.from_folder(folder, cache=cache)
        ids = tokenizer.encode_ids("the server", add_special_tokens=False)
        assert tokenizer.decode(ids) == "the server"

        def refuse(*args: Any, **options: Any) -> None:
            raise AssertionError("converted again")

        monkeypatch.setattr("tgi_trio.router.text.tokenizer_files.subprocess.run", refuse)
        again = Tokenizer.from_folder(folder, cache=cache)
        assert (
            again.encode_ids("the server").tolist() == tokenizer.encode_ids("the server").tolist()
        )

    def test_a_conversion_that_fails_says_why(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(b"not a model")
        with pytest.raises(ModelLoadError, match=r"could not be converted: .+ tokenizer.json"):
            Tokenizer.from_folder(folder, cache=tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_a_file_of_tiktoken_s_is_read_as_it_is_now(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its library keeps copies by path: the old tokenizer was served for a new file."""
        pytest.importorskip("tiktoken", reason="tiktoken is not installed")
        temporary, folder = tmp_path / "temporary", tmp_path / "model"
        temporary.mkdir()
        folder.mkdir()
        monkeypatch.setenv("TMPDIR", str(temporary))
        for pair in (b"ab", b"xy"):
            tokens = [*(bytes([byte]) for byte in range(256)), pair]
            lines = [b"%b %d\n" % (b64encode(token), id) for id, token in enumerate(tokens)]
            (folder / "tokenizer.model").write_bytes(b"".join(lines))
            tokenizer = Tokenizer.from_folder(folder, cache=tmp_path / "cache")
            assert tokenizer.encode_ids(pair.decode(), add_special_tokens=False).tolist() == [256]
        assert list(temporary.iterdir()) == []


def test_the_router_loads_a_tokenizer_without_transformers_or_torch(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path)
    program = (
        "import sys; from pathlib import Path\n"
        "from tgi_trio.router.text.output import OutputText\n"
        "from tgi_trio.router.text.tokenizer import Tokenizer\n"
        "Tokenizer.from_folder(Path(sys.argv[1])).encode_ids('a' * 999)\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_another_tokenizer_config_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere\.json cannot be read"):
        Tokenizer.from_folder(demo.model_path(), config_path=tmp_path / "nowhere.json")
