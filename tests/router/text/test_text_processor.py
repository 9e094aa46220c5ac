"""Wordings of adapters: which files are read, what they become, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.text.kinds import BACKENDS, served
from tgi_trio.errors import ModelLoadError
from tgi_trio.router.text import own_files
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.own_files import ModelVocabulary, read_own_files
from tgi_trio.router.text.text_processor import (
    ModelTextProcessor,
    TextProcessor,
    make_text_processor,
)
from tgi_trio.router.text.thoughts.derive import ThoughtSettings
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.router.text.tokenizer_files import TokenizerConfig
from tgi_trio.router.text.vocabularies import Comparison, compare_vocabularies, main

ROWS = 1000  # of the model: more than any of these tokenizers has
MARKS = ("<|im_start|>", "<|im_end|>", "⟨mark⟩")
PIECES = ["Hello", " the server", "\n", "  \n", "é", "😀", "日本", "x == 10", "<s>", "<|user|>"]
TEXTS = st.lists(st.sampled_from([*PIECES, *MARKS]) | st.text(max_size=4), max_size=8).map("".join)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
OTHER = "{% for m in messages %}<|im_start|>{{ m.content }}{{ eos_token }}{% endfor %}"


def kind_file(folder: Path, kind: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    served(kind)._backend.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def change(file: Path, whole: dict[str, Any], **dumps: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(whole, **dumps))
    return file


def with_marks(file: Path, into: Path, marks: tuple[str, ...] = MARKS) -> Path:
    """Write a tokenizer with marks added behind all that it has."""
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.add_tokens([tokenizers.AddedToken(each, special=True) for each in marks])
    into.parent.mkdir(parents=True, exist_ok=True)
    backend.save(str(into))
    return into


class Base:
    """A model's folder, and those of its adapters beside it."""

    def __init__(
        self, root: Path, template: str | None = TEMPLATE, kind: str = "byte_level", **more: Any
    ) -> None:
        self.root, self.folder = root, root / "model"
        self.file = kind_file(self.folder, kind)
        config = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": TEMPLATE}
        (self.folder / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.from_folder(self.folder)
        special = tokenizer.special_tokens
        chat = None if template is None else ChatTemplate({"default": template}, special)
        self.vocabulary = ModelVocabulary(self.file, ROWS)
        eos = frozenset({tokenizer.token_id("</s>") or 0})
        self.model = ModelTextProcessor(
            TextProcessor(tokenizer, chat),
            eos,
            self.vocabulary.parts,
            None,
            ThoughtSettings(),
            **more,
        )

    def adapter(self, name: str, **files: str | dict[str, Any]) -> Path:
        """Write files, each named by its stem."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        for stem, content in files.items():
            if isinstance(content, str):
                (folder / f"{stem}.jinja").write_text(content)
            else:
                (folder / f"{stem}.json").write_text(json.dumps(content))
        return folder

    def text_processor(self, folder: Path) -> TextProcessor:
        files = read_own_files(folder, self.vocabulary)
        return (
            self.model.text_processor if files is None else make_text_processor(files, self.model)
        )


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(tmp_path)


# --- tokenizers ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_derived_tokenizer_does_what_its_file_does(kind: str, tmp_path: Path) -> None:
    """Whatever its kind: texts, single tokens, and the ids of marks."""
    file = kind_file(tmp_path / "model", kind)
    own = with_marks(file, tmp_path / "own" / "tokenizer.json")
    whole = tokenizers.Tokenizer.from_file(str(own))
    config = TokenizerConfig({"eos_token": MARKS[1]}, (), {})
    vocabulary = ModelVocabulary(file, ROWS)
    files = read_own_files(own.parent, vocabulary)
    assert files is not None and files.file == own
    base = served(kind)
    derived = base.derive(files.parts, config)
    before = base.encode_ids("Hello the server").tolist()

    @settings(max_examples=60, deadline=None)
    @given(TEXTS, st.booleans())
    def same(text: str, special: bool) -> None:
        ids = whole.encode(text, add_special_tokens=special).ids
        assert derived.encode_ids(text, special).tolist() == ids
        assert derived.decode(ids, skip_special=False) == whole.decode(
            ids, skip_special_tokens=False
        )

    same()
    assert {whole.token_to_id(each) for each in MARKS} <= derived.special_ids
    assert base.encode_ids("Hello the server").tolist() == before
    assert MARKS[0] not in base.added_tokens


def test_added_tokens_whose_ids_cannot_be_theirs_are_refused(base: Base) -> None:
    whole = json.loads(base.file.read_text())
    whole["added_tokens"].append({**whole["added_tokens"][0], "id": 990, "content": "<far>"})
    change(base.root / "far" / "tokenizer.json", whole)
    with pytest.raises(ModelLoadError, match=r"'<far>' of the tokenizer has the id 990, and would"):
        base.text_processor(base.root / "far")


# --- vocabularies ----------------------------------------------------------------------------


def test_vocabularies_are_compared_by_what_they_mean(base: Base, tmp_path: Path) -> None:
    whole = json.loads(base.file.read_text())
    model = whole["model"]
    texts = [" ".join(pair) for pair in model["merges"]]
    told = {**model, "merges": texts, "ignore_merges": False, "end_of_word_suffix": ""}
    same = change(tmp_path / "same.json", {**whole, "model": told}, indent=4)
    assert compare_vocabularies(base.file, same) == Comparison("")
    names = list(model["vocab"])
    swapped = {**model["vocab"], names[300]: model["vocab"][names[301]]}
    swapped[names[301]] = model["vocab"][names[300]]
    fewer = {name: id for name, id in model["vocab"].items() if name != names[-1]}
    few = {name: id for name, id in model["vocab"].items() if id < 50}
    for changed, difference, same_ids in (
        ({"vocab": fewer}, f"it has {len(fewer)} tokens, and the model's {len(names)}", True),
        ({"merges": model["merges"][:-1]}, "it has other merges", True),
        ({"ignore_merges": True}, "`ignore_merges` is True, and None for the model", True),
        ({"vocab": swapped}, " for the model, and ", False),
        ({"vocab": few}, "they share ", False),
    ):
        other = change(tmp_path / "other.json", {**whole, "model": {**model, **changed}})
        found = compare_vocabularies(base.file, other)
        assert difference.replace("None", repr(model.get("ignore_merges"))) in found.difference
        assert found.same_ids is same_ids
        (base.root / "adapter").mkdir(exist_ok=True)
        other.rename(base.root / "adapter" / "tokenizer.json")
        if same_ids:
            read = read_own_files(base.root / "adapter", base.vocabulary)
            assert read is not None and not read.shares
            continue
        with pytest.raises(ModelLoadError, match="another vocabulary than the model's"):
            read_own_files(base.root / "adapter", base.vocabulary)


def test_a_vocabulary_of_the_same_ids_is_read_whole(base: Base) -> None:
    """As a model has it whose tokenizer was written by another tool, such as one of GGUF files."""
    whole = json.loads(base.file.read_text())
    whole["model"]["merges"] = whole["model"]["merges"][:40]
    folder = base.adapter("other", tokenizer=whole)
    text_processor, text = base.text_processor(folder), "The server keeps a batch of sequences"
    ids = text_processor.tokenizer.encode_ids(text, False).tolist()
    expected = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert ids == expected != base.model.text_processor.tokenizer.encode_ids(text, False).tolist()
    assert text_processor.file == folder / "tokenizer.json"


def test_a_process_of_its_own_says_the_same(
    base: Base, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_files, "_SMALL", 0)  # as if they were large
    apart = ModelVocabulary(base.file, ROWS, in_subprocess=True)
    whole = json.loads(base.file.read_text())
    whole["model"]["merges"].pop()
    other = change(base.root / "other.json", whole)
    assert apart.compare(base.file) == Comparison("")
    assert apart.compare(other) == apart.compare(other) == Comparison("it has other merges")
    broken = base.root / "broken.json"
    broken.write_text("{}")
    with pytest.raises(ModelLoadError, match=r"broken.json cannot be read as a tokenizer"):
        apart.compare(broken)
    assert main([str(base.file), str(other)]) == 0
    assert "it has other merges" in capsys.readouterr().out


# --- what a folder says ----------------------------------------------------------------------


def test_a_folder_that_says_what_the_model_s_does_is_the_model_s(base: Base) -> None:
    assert base.text_processor(base.adapter("nothing")) is base.model.text_processor
    whole = json.loads(base.file.read_text())
    whole["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst"}
    config = json.loads((base.folder / "tokenizer_config.json").read_text())
    folder = base.adapter("same", tokenizer=whole, tokenizer_config=config)
    assert base.text_processor(folder) is base.model.text_processor


def test_a_template_alone(base: Base) -> None:
    text_processor = base.text_processor(base.adapter("templated", chat_template=OTHER))
    assert (
        text_processor.tokenizer is base.model.text_processor.tokenizer and not text_processor.ends
    )
    assert text_processor.file is None
    assert text_processor.chat_template is not None
    said = text_processor.chat_template.render([{"role": "user", "content": "Hi"}])
    assert said == "<|im_start|>Hi</s>"


def test_marks_in_spare_rows(base: Base) -> None:
    folder = base.adapter("marked", chat_template=OTHER)
    own = with_marks(base.file, folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": MARKS[1]}))
    text_processor = base.text_processor(folder)
    end = text_processor.tokenizer.token_id(MARKS[1])
    assert text_processor.ends == (end,) and text_processor.file == own
    assert text_processor.chat_template is not None
    said = text_processor.chat_template.render([{"role": "user", "content": "Hi"}])
    assert said == "<|im_start|>Hi<|im_end|>"
    assert text_processor.tokenizer.encode_ids(said, False)[-1] == end


def test_which_tokens_end_an_answer(base: Base) -> None:
    """The tokenizer's, if the model's has another, and those of a generation config."""
    user = base.model.text_processor.tokenizer.token_id("<|user|>")
    eos = base.model.text_processor.tokenizer.token_id("</s>")

    def ends(**files: dict[str, Any]) -> tuple[int, ...]:
        folder = base.adapter(f"ends{random.random()}", **files)
        return base.text_processor(folder).ends

    assert ends(tokenizer_config={"eos_token": "<|user|>"}) == (user,)
    assert ends(tokenizer_config={"eos_token": "</s>"}) == ()
    assert ends(tokenizer_config={"pad_token": "<s>"}) == ()
    assert ends(generation_config={"eos_token_id": [eos, 7]}) == (7,)
    assert ends(generation_config={"eos_token_id": 9}) == (9,)
    assert ends(generation_config={"temperature": 1}) == ()
    found = ends(generation_config={"eos_token_id": 9}, tokenizer_config={"eos_token": "<|user|>"})
    assert found == tuple(sorted((9, user or 0)))


def test_a_template_of_a_flag_is_that_of_adapters_that_have_the_model_s(tmp_path: Path) -> None:
    base = Base(tmp_path, template="flag:{{ messages[0].content }}")
    chat = [{"role": "user", "content": "Hi"}]

    def said(**files: Any) -> str:
        template = base.text_processor(base.adapter(f"a{random.random()}", **files)).chat_template
        return "" if template is None else template.render(chat)

    assert said(chat_template=TEMPLATE) == "flag:Hi"
    assert said(tokenizer_config={"eos_token": "<|user|>"}) == "flag:Hi"
    assert said(chat_template=OTHER) == "<|im_start|>Hi</s>"
    without = Base(tmp_path / "without", template=None)
    assert (
        without.text_processor(without.adapter("a", chat_template=OTHER)).chat_template is not None
    )
    config = {"eos_token": "<|user|>"}
    assert (
        without.text_processor(without.adapter("b", tokenizer_config=config)).chat_template is None
    )


def test_thoughts_and_calls_are_those_of_the_template(base: Base) -> None:
    thinks = "{% for m in messages %}{{ m.content }}<think></think>{% endfor %}"
    text_processor = base.text_processor(base.adapter("thinks", chat_template=thinks))
    assert text_processor.thoughts is not None and base.model.text_processor.thoughts is None


def test_tokens_beyond_the_model_s_rows(base: Base, tmp_path: Path) -> None:
    size = base.model.text_processor.tokenizer.vocab_size
    tight = ModelVocabulary(base.file, size + 1)
    folder = base.adapter("marked")
    with_marks(base.file, folder / "tokenizer.json")
    with pytest.raises(ModelLoadError) as refused:
        read_own_files(folder, tight)
    assert f"(`{MARKS[1]}`, `{MARKS[2]}`) beyond the {size + 1} that" in str(refused.value)
    assert "--adapter-tokenizers base" in str(refused.value)
    padded = base.adapter("padded", tokenizer_config={"pad_token": "<pad>"})
    with_marks(base.file, padded / "tokenizer.json", (MARKS[0], "<pad>"))
    assert read_own_files(padded, tight) is not None
    own = ModelVocabulary(folder / "tokenizer.json", size + 1)  # the model's has as many
    assert read_own_files(folder, own) is not None


def test_where_a_prompt_may_have_images_the_model_s_tokens_stay(tmp_path: Path) -> None:
    base = Base(tmp_path, keeps_added=True)
    whole = json.loads(base.file.read_text())
    whole["added_tokens"] = [
        each if each["content"] != "<|user|>" else {**each, "content": "<|renamed|>"}
        for each in whole["added_tokens"]
    ]
    vocab = whole["model"]["vocab"]
    assert "<|user|>" not in vocab
    with pytest.raises(ModelLoadError, match=r"does not have '<\|user\|>' as token"):
        base.text_processor(base.adapter("renamed", tokenizer=whole))
    marked = base.adapter("marked")
    with_marks(base.file, marked / "tokenizer.json")
    assert base.text_processor(marked).file is not None


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("generation_config.json", "[", "cannot be read"),
        ("generation_config.json", '{"eos_token_id": "x"}', "needs ids of tokens"),
        ("generation_config.json", '{"eos_token_id": 1000}', "the model has 1000 tokens"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "nowhere"}', "is not a token of the tokenizer"),
        ("tokenizer_config.json", '{"chat_template": {"a": 1}}', "a chat template must be a text"),
        ("chat_template.json", '{"chat_template": [{"name": "a", "template": null}]}', "a text"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"0": {"content": []}}}',
            "an added token must be a text",
        ),
        ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
        ("tokenizer.json", '{"model": {"vocab": ""}}', "cannot be read as a tokenizer"),
        (
            "tokenizer.json",
            '{"model": {"vocab": {}}, "added_tokens": [{"id": 0, "content": []}]}',
            "cannot be read as a tokenizer",
        ),
    ],
)
def test_damaged_files(base: Base, name: str, content: str, told: str) -> None:
    folder = base.adapter("damaged")
    (folder / name).write_text(content)
    with pytest.raises(ModelLoadError, match=told):
        base.text_processor(folder)
