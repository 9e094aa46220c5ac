"""The text processors of adapters: read once, kept while they are used, dropped with their
adapters."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import trio

from tests.router.harness import byte_tokenizer
from tgi_trio.errors import Unavailable, ValidationError
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.adapters.text_processors import TextProcessors
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.own_files import ModelVocabulary
from tgi_trio.router.text.text_processor import ModelTextProcessor, TextProcessor
from tgi_trio.router.text.thoughts.derive import ThoughtSettings

pytestmark = pytest.mark.trio
NAMES = ("a", "b", "c", "plain")


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Three adapters with templates of their own, and one without."""
    found = {name: tmp_path / name for name in NAMES}
    for name, folder in found.items():
        folder.mkdir()
        if name != "plain":
            (folder / "chat_template.jinja").write_text(f"{name}:{{{{ messages[0].content }}}}")
    return found


def text_processors(folder: Path, most: int = 2, *, own: bool = True) -> TextProcessors:
    (folder / "model").mkdir(exist_ok=True)
    tokenizer = byte_tokenizer(folder / "model")
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    vocabulary = ModelVocabulary(folder / "model" / "tokenizer.json", tokenizer.vocab_size)
    model = ModelTextProcessor(
        TextProcessor(tokenizer, template),
        frozenset({2}),
        vocabulary.parts,
        None,
        ThoughtSettings(),
    )
    return TextProcessors(model, vocabulary if own else None, most)


def said(text_processor: TextProcessor) -> str:
    assert text_processor.chat_template is not None
    return text_processor.chat_template.render([{"role": "user", "content": "Hi"}])


async def test_each_adapter_has_its_own(tmp_path: Path, folders: dict[str, Path]) -> None:
    registry, own = AdapterRegistry(folders, 2), text_processors(tmp_path)
    for name in (*NAMES, *NAMES):
        expected = "Hi" if name == "plain" else f"{name}:Hi"
        assert said(await own.find(registry.find(name))) == expected
        assert len(own) <= 2
    assert await own.find(registry.find("plain")) is own.model


async def test_the_last_ones_are_kept_and_read_once(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    registry, own = AdapterRegistry(folders, 2), text_processors(tmp_path)
    a, b, c = (registry.find(name) for name in "abc")
    found: list[TextProcessor] = []

    async def ask() -> None:
        found.append(await own.find(a))

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask)
    assert len(found) == 5 and all(each is found[0] for each in found)
    second = await own.find(b)
    assert await own.find(a) is found[0]
    await own.find(c)  # `b` was used least recently
    assert await own.find(a) is found[0] and await own.find(b) is not second


async def test_one_that_is_forgotten_or_replaced(tmp_path: Path, folders: dict[str, Path]) -> None:
    registry, own = AdapterRegistry(folders, 2, grows=True), text_processors(tmp_path)
    registry.on_forgotten(own.forget)
    old = registry.find("a")
    await own.find(old)
    assert len(own) == 1
    registry.unload("a")
    assert len(own) == 0
    await own.find(old)  # a request that began before
    assert len(own) == 0


async def test_files_that_cannot_be_used_are_told_and_read_again(
    tmp_path: Path, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    registry, own = AdapterRegistry(folders, 2), text_processors(tmp_path)
    (folders["a"] / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(Unavailable, match=r"the adapter `a` cannot be read now.* log names$"):
        await own.find(registry.find("a"))
    assert "the adapter `a` cannot be read: The chat template 'default' does" in caplog.text
    with pytest.raises(ValidationError, match="does not compile"):
        await own.check(folders["a"])
    (folders["a"] / "chat_template.jinja").write_text("new")
    await own.check(folders["a"])
    assert said(await own.find(registry.find("a"))) == "new"


async def test_an_adapter_whose_folder_is_gone_has_not_the_model_s_texts(
    tmp_path: Path, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    registry, own = AdapterRegistry(folders, 2), text_processors(tmp_path)
    shutil.rmtree(folders["a"])
    with pytest.raises(Unavailable) as refusal:
        await own.find(registry.find("a"))
    assert str(folders["a"]) in caplog.text and str(folders["a"]) not in str(refusal.value)


async def test_one_that_asks_may_leave(tmp_path: Path, folders: dict[str, Path]) -> None:
    registry, own = AdapterRegistry(folders, 2), text_processors(tmp_path)
    with trio.CancelScope() as scope:
        scope.cancel()
        await own.find(registry.find("a"))
    assert scope.cancelled_caught and len(own) == 0
    assert said(await own.find(registry.find("a"))) == "a:Hi"


async def test_those_that_are_loaded_with_the_model_are_read_ahead(
    tmp_path: Path, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    registry, own = AdapterRegistry(folders, 2), text_processors(tmp_path)
    (folders["a"] / "chat_template.jinja").write_text("{% if %}")
    await own.warm(registry)
    assert len(own) == 1  # what is wrong with `a` is told to who asks for it
    (folders["b"] / "chat_template.jinja").unlink()
    assert said(await own.find(registry.find("b"))) == "b:Hi"
    assert "the adapter b has its own chat template" in caplog.text
    with pytest.raises(Unavailable, match="the adapter `a`"):
        await own.find(registry.find("a"))


async def test_the_model_s_for_all(tmp_path: Path, folders: dict[str, Path]) -> None:
    registry, own = AdapterRegistry(folders, 2), text_processors(tmp_path, own=False)
    assert await own.find(registry.find("a")) is own.model
    (folders["a"] / "chat_template.jinja").write_text("{% if %}")
    await own.check(folders["a"])
