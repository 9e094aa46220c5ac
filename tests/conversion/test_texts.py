"""What a merged model says of texts: what its adapter is asked with beside others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import tokenizers

from tests.router.text.kinds import served
from tgi_trio.conversion.adapters import merge_model
from tgi_trio.conversion.lora import merge_adapter
from tgi_trio.conversion.texts import SOURCES, place_texts
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.resolve import resolve_model
from tgi_trio.model.config import read_config
from tgi_trio.router.text import tokenizer_files
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.own_files import ModelVocabulary, read_own_files
from tgi_trio.router.text.text_processor import (
    ModelTextProcessor,
    TextProcessor,
    make_text_processor,
)
from tgi_trio.router.text.thoughts.derive import ThoughtSettings
from tgi_trio.router.text.tokenizer import Tokenizer

DATA: Final = Path(__file__).parent / "data" / "llama"
ROWS: Final = 1000
ORDINARY: Final = "er"  # a token of the vocabulary
MARKS: Final = ("<|im_start|>", "<|im_end|>")
OLD: Final = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
NEW: Final = "{% for m in messages %}<|im_start|>{{ m.content }}{{ eos_token }}{% endfor %}"
OTHER: Final = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
CHAT: Final[list[dict[str, Any]]] = [{"role": "user", "content": "Hello the server"}]
TEXT: Final = f"Hello {MARKS[0]}the{MARKS[1]} server</s> <s> x == 10"

Write = Callable[[Path], None]


def put(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def files(**contents: Any) -> Write:
    """Return what writes files, each named by its stem: text is a template."""

    def write(folder: Path) -> None:
        for stem, content in contents.items():
            name = stem.replace("__", "/")
            put(folder, f"{name}.jinja" if isinstance(content, str) else f"{name}.json", content)

    return write


def own_tokenizer(folder: Path) -> None:
    """Write a tokenizer with marks that the base's lacks."""
    backend = tokenizers.Tokenizer.from_str(served("byte_level")._backend.to_str())
    backend.add_tokens([tokenizers.AddedToken(each, special=True) for each in MARKS])
    folder.mkdir(exist_ok=True, parents=True)
    backend.save(str(folder / "tokenizer.json"))


def whole_tokenizer(folder: Path) -> None:
    own_tokenizer(folder)
    put(folder, "tokenizer_config.json", {"eos_token": MARKS[1], "chat_template": NEW})


def marked_and_configured_elsewhere(folder: Path) -> None:
    own_tokenizer(folder)
    named = {"eos_token": MARKS[1], "additional_special_tokens": [ORDINARY, MARKS[0]]}
    put(folder, "special_tokens_map.json", named)


def saved_by_transformers(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    own_tokenizer(folder)
    made = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token=MARKS[1]
    )
    made.chat_template = {"default": NEW, "tool_use": OTHER}
    made.save_pretrained(folder)


CONFIGURED: Final = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": OLD}
LISTED: Final = {"name": "default", "template": NEW}
FAR: Final = {"added_tokens_decoder": {str(ROWS): {"content": "<f>"}}}
DECODED: Final = {"added_tokens_decoder": {"286": {"content": "at", "special": True}}}
BASES: Final[dict[str, Write]] = {
    "all in one": files(
        tokenizer_config=CONFIGURED | DECODED, generation_config={"eos_token_id": 7}
    ),
    "files": files(
        tokenizer_config={"bos_token": "<s>"},
        special_tokens_map={"eos_token": {"content": "</s>"}, "additional_special_tokens": ["at"]},
        chat_template=OLD,
        additional_chat_templates__tool_use=OTHER,
    ),
    "no template": files(tokenizer_config={"eos_token": "</s>"}),
    "a processor": files(
        tokenizer_config={"eos_token": "</s>"}, processor_config={"size": 3, "chat_template": OLD}
    ),
    "older json": files(
        tokenizer_config=CONFIGURED, special_tokens_map={"eos_token": "<s>"},
        chat_template={"chat_template": OTHER},
    ),
}  # fmt: skip
ADAPTERS: Final[dict[str, Write]] = {
    "nothing": files(),
    "a template": files(chat_template=NEW),
    "templates": files(chat_template=NEW, additional_chat_templates__rag=OTHER),
    "an older template": files(chat_template={"chat_template": NEW}),
    "a processor's template": files(processor_config={"chat_template": NEW, "size": 9}),
    "a template in the configuration": files(
        tokenizer_config={"eos_token": "</s>", "chat_template": [LISTED]}
    ),
    "another end": files(tokenizer_config={"bos_token": "<s>", "eos_token": ORDINARY}),
    "no end": files(tokenizer_config={"bos_token": "<s>", "eos_token": None}),
    "ends": files(generation_config={"eos_token_id": [7, 9], "temperature": 0.1}),
    "an end, and a map": files(
        generation_config={"eos_token_id": 9},
        special_tokens_map={"eos_token": "<s>", "additional_special_tokens": [ORDINARY]},
    ),
    "a map alone": files(special_tokens_map={"eos_token": "<s>"}),
    "marks alone": own_tokenizer,
    "marks and a map": marked_and_configured_elsewhere,
    "whole": whole_tokenizer,
    "by transformers": saved_by_transformers,
}  # fmt: skip


@dataclass
class Folders:
    base: Path
    adapter: Path
    target: Path

    def place(self) -> list[str]:
        shutil.copytree(self.base, self.target)
        return place_texts(self.adapter, self.base, self.target, ROWS)

    def beside(self) -> tuple[TextProcessor, set[int]]:
        """What the adapter is asked with beside others, and what ends its answers."""
        tokenizer = Tokenizer.from_folder(self.base)
        vocabulary = ModelVocabulary(self.base / "tokenizer.json", ROWS)
        eos = frozenset(read_config(self.base).eos_ids)
        plain = TextProcessor(tokenizer, template_of(tokenizer))
        model = ModelTextProcessor(plain, eos, vocabulary.parts, None, ThoughtSettings())
        found = read_own_files(self.adapter, vocabulary)
        text_processor = plain if found is None else make_text_processor(found, model)
        return text_processor, {*eos, *text_processor.ends}


def template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    sources = tokenizer.chat_templates
    return ChatTemplate(sources, tokenizer.special_tokens) if sources else None


def make(root: Path, base: Write, adapter: Write) -> Folders:
    for folder in (root / "base", root / "adapter"):
        folder.mkdir(parents=True)
    served("byte_level")._backend.save(str(root / "base" / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": ROWS, "eos_token_id": 2, "pad_token_id": 4}
    put(root / "base", "config.json", config)
    base(root / "base")
    adapter(root / "adapter")
    return Folders(root / "base", root / "adapter", root / "target")


def shown(template: ChatTemplate | None) -> Any:
    return None if template is None else (template.sources, template.render(CHAT))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("base", BASES)
def test_it_is_what_the_adapter_is_asked_with_beside_others(
    base: str, adapter: str, tmp_path: Path
) -> None:
    folders = make(tmp_path, BASES[base], ADAPTERS[adapter])
    wanted, ends = folders.beside()
    folders.place()
    found = Tokenizer.from_folder(folders.target)
    assert found.special_tokens == wanted.tokenizer.special_tokens
    assert found.special_ids == wanted.tokenizer.special_ids
    assert found.added_tokens == wanted.tokenizer.added_tokens
    assert found.encode_ids(TEXT).tolist() == wanted.tokenizer.encode_ids(TEXT).tolist()
    template = template_of(found)
    assert shown(template) == shown(wanted.chat_template)
    assert set(read_config(folders.target).eos_ids) == ends


@pytest.mark.parametrize("base", BASES)
def test_a_folder_without_any_changes_no_byte(base: str, tmp_path: Path) -> None:
    folders = make(tmp_path, BASES[base], files())
    assert folders.place() == []
    for path in folders.base.rglob("*"):
        copy = folders.target / path.relative_to(folders.base)
        assert path.is_dir() or copy.read_bytes() == path.read_bytes()


def test_files_of_a_vocabulary_are_taken_together(tmp_path: Path) -> None:
    """None of the base's is left beside the adapter's, whichever formats they have."""
    folders = make(tmp_path, BASES["all in one"], files(tokenizer_config={"eos_token": "</s>"}))
    for name in ("spiece.model", "vocab.json", "merges.txt", "added_tokens.json"):
        put(folders.base, name, "{}")
    put(folders.adapter, "tokenizer.model", "pieces")
    folders.place()
    left = {path.name for path in folders.target.iterdir()}
    assert left == {
        "config.json",
        "generation_config.json",
        "tokenizer.model",
        "tokenizer_config.json",
    }
    config = json.loads((folders.target / "tokenizer_config.json").read_text())
    assert config == {"eos_token": "</s>", "chat_template": OLD}


def test_what_makes_a_tokenizer_is_what_the_router_reads() -> None:
    assert {"tokenizer.json", *tokenizer_files._SLOW_FILES} == set(SOURCES)


def test_what_generates_keeps_the_other_ids_of_the_base(tmp_path: Path) -> None:
    """A model of encoder and decoder starts with a token that config.json alone may state."""
    from transformers import GenerationConfig, T5Config

    folders = make(tmp_path, files(tokenizer_config={"eos_token": "</s>"}), ADAPTERS["ends"])
    config = T5Config(vocab_size=ROWS).to_dict() | {"decoder_start_token_id": 5}
    put(folders.base, "config.json", config)
    wanted = GenerationConfig.from_model_config(T5Config.from_pretrained(folders.base))
    folders.place()
    found = GenerationConfig.from_pretrained(folders.target)
    assert found.eos_token_id == [wanted.eos_token_id, 7, 9]
    for name in ("decoder_start_token_id", "pad_token_id", "bos_token_id", "temperature"):
        assert getattr(found, name) == getattr(wanted, name)


@pytest.mark.parametrize(
    ("adapter", "named"),
    [
        (files(generation_config={"eos_token_id": ROWS}), "_id` 1000; the model has 1000 tokens"),
        (files(generation_config={"eos_token_id": "x"}), "needs ids of tokens"),
        (files(generation_config={"eos_token_id": [True]}), "needs ids of tokens"),
        (files(generation_config=[]), "generation_config.json holds no JSON object"),
        (files(tokenizer_config={"eos_token": "<nowhere>"}), "'<nowhere>' is not a token"),
        (files(tokenizer_config={"eos_token": "<f>", **FAR}), "is token 1000; the model has 1000"),
        (lambda folder: put(folder, "tokenizer_config.json", "{" * 9), "cannot be read"),
        (lambda folder: put(folder, "tokenizer_config.json", '{"a":' * 99999), "cannot be read"),
        (files(tokenizer={"added_tokens": 3}, tokenizer_config={"eos_token": "x"}), "damaged"),
        (files(tokenizer={"model": 3}, tokenizer_config={"eos_token": "x"}), "damaged"),
        (files(tokenizer_config={"eos_token": "<x>", "added_tokens_decoder": {"y": 1}}), "damaged"),
    ],
)
def test_what_is_wrong_is_named(adapter: Write, named: str, tmp_path: Path) -> None:
    folders = make(tmp_path, BASES["all in one"], adapter)
    with pytest.raises(ModelLoadError, match=named):
        folders.place()


# --- whole merges ----------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A base with a tokenizer, and an adapter with one that transformers saved."""
    root = Path(shutil.copytree(DATA, tmp_path / "model"))
    served("byte_level")._backend.save(str(root / "base" / "tokenizer.json"))
    BASES["all in one"](root / "base")
    saved_by_transformers(root / "adapter")
    tokens = json.loads((root / "adapter" / "tokenizer.json").read_text())["added_tokens"]
    config = json.loads((root / "base" / "config.json").read_text())
    assert config["vocab_size"] > 7
    (root / "ids").write_text(json.dumps([each["id"] for each in tokens[-2:]]))
    return root


def fit(model: Path) -> None:
    """Let the adapter's marks be tokens that the small model has rows for."""
    file = model / "adapter" / "tokenizer.json"
    whole = json.loads(file.read_text())
    rows = json.loads((model / "base" / "config.json").read_text())["vocab_size"]
    vocabulary = {name: id for name, id in whole["model"]["vocab"].items() if id < rows - 2}
    whole["model"] |= {"vocab": vocabulary, "merges": []}
    whole["added_tokens"] = [each for each in whole["added_tokens"] if each["id"] < rows - 2]
    for number, mark in enumerate(MARKS, rows - 2):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        whole["added_tokens"].append({"id": number, "content": mark, "special": True, **flags})
    file.write_text(json.dumps(whole))


def test_transformers_finds_the_adapter_s_in_the_merged_folder(model: Path) -> None:
    from transformers import AutoTokenizer

    fit(model)
    lines: list[str] = []
    merge_adapter(model / "adapter", model / "base", model / "out", lines.append)
    wanted = AutoTokenizer.from_pretrained(model / "adapter")
    found = AutoTokenizer.from_pretrained(model / "out")
    assert found.get_vocab() == wanted.get_vocab()
    assert found.special_tokens_map == wanted.special_tokens_map
    assert found.chat_template == wanted.chat_template == {"default": NEW, "tool_use": OTHER}
    assert found(TEXT).input_ids == wanted(TEXT).input_ids
    rows = json.loads((model / "base" / "config.json").read_text())["vocab_size"]
    assert read_config(model / "out").eos_ids == (7, rows - 1)
    assert lines[-1] == (
        "the adapter's own: the vocabulary, the tokenizer's configuration, the chat template, "
        "some of the ends"
    )


def test_the_base_s_are_kept_where_that_is_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fit(model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(model)
    own = resolve_model(str(model / "adapter"))
    base = resolve_model(str(model / "adapter"), own_texts=False)
    assert own != base
    for path in (model / "base").iterdir():
        if path.suffix == ".json":
            assert (base / path.name).read_bytes() == path.read_bytes()
    assert (own / "tokenizer.json").read_bytes() == (model / "adapter/tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", ["generation_config.json", "additional_chat_templates/rag.jinja"])
def test_an_adapter_whose_texts_have_changed_is_merged_again(model: Path, name: str) -> None:
    fit(model)
    before = merge_model(model / "adapter", model / "base", model / "cache")
    put(model / "adapter", name, "{}")
    after = merge_model(model / "adapter", model / "base", model / "cache")
    assert after != before
    assert merge_model(model / "adapter", model / "base", model / "cache") == after
