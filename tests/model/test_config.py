"""One reader of config.json, with one rule for nested text configs, for settings and backends."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tgi_trio
from tests.model.support import LLAMA, write_json
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import RopeScaling, read_config, read_values
from tgi_trio.model.facts import read_model_facts
from tgi_trio.model.leftovers import find_mute_parts

TEXT = {"max_position_embeddings": 77, "vocab_size": 5, "dtype": "bfloat16", "eos_token_id": 3}
POSITION_KEYS = (
    "max_position_embeddings n_positions max_seq_len n_ctx seq_length".split()
)  # every name a family has for it


THINKER = {"text_config": TEXT | {"eos_token_id": None}, "audio_config": {"d_model": 1}}


@pytest.mark.parametrize(
    ("whole", "generation", "kind", "eos"),
    [
        ({"thinker_config": THINKER | {"eos_token_id": 7}}, {}, "qwen2_5_omni_text", (7,)),
        ({"thinker_config": THINKER}, {"eos_token_id": 9}, "qwen2_5_omni_text", (9,)),
        ({"thinker_config": THINKER}, {}, "qwen3_omni_moe_text", (151645,)),
        ({"thinker_config": THINKER}, {"thinker_eos_token_id": 8}, "qwen3_omni_moe_text", (8,)),
    ],
)
def test_of_a_model_that_speaks_what_thinks_is_read(
    tmp_path: Path, whole: dict[str, Any], generation: dict[str, Any], kind: str, eos: Any
) -> None:
    family = kind.removesuffix("_text")
    said = {"model_type": family, "talker_config": {"vocab_size": 1}, "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(said | whole))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = read_config(tmp_path)
    assert (config.model_type, config.text_type) == (f"{family}_thinker", kind)
    assert (config.vocab_size, config.dtype, config.eos_ids) == (5, "bfloat16", eos)
    assert config.get("audio_config") == {"d_model": 1} and config.wraps_text
    (warning,) = find_mute_parts(config)
    assert "what would speak them is not served (talker)" in warning


@pytest.mark.parametrize(
    ("config", "positions", "vocab", "dtype"),
    [
        *(({"model_type": "llama", key: 99}, 99, 0, None) for key in POSITION_KEYS),
        ({"model_type": "m", "torch_dtype": "float16", "vocab_size": 7}, 0, 7, "float16"),
        ({"model_type": "m", "text_config": TEXT}, 77, 5, "bfloat16"),
        ({"model_type": "m", "decoder": TEXT}, 77, 5, "bfloat16"),
        # Numbers beside a text config are of the whole model.
        ({"model_type": "m", "vocab_size": 9, "text_config": TEXT}, 77, 5, "bfloat16"),
        ({"model_type": "m", "torch_dtype": "float32", "text_config": TEXT}, 77, 5, "bfloat16"),
        ({"model_type": "m", "n_positions": 9, "text_config": {"vocab_size": 4}}, 9, 4, None),
        ({"model_type": "m", "max_position_embeddings": None, "n_ctx": 8}, 8, 0, None),
    ],
)
def test_settings_and_backends_read_the_same(
    tmp_path: Path, config: dict[str, Any], positions: int, vocab: int, dtype: str | None
) -> None:
    write_json(tmp_path, config)
    read, facts = read_config(tmp_path), read_model_facts(tmp_path)
    assert (read.model_type, read.max_positions, read.vocab_size, read.dtype) == (
        config["model_type"], positions, vocab, dtype,
    )  # fmt: skip
    assert facts.model_type == read.model_type
    assert (facts.max_positions or 0, facts.vocab_size or 0) == (positions, vocab)
    assert facts.dtype == dtype


def test_numbers_of_a_composite_model_are_those_that_transformers_takes(tmp_path: Path) -> None:
    from transformers import AutoConfig

    text = {"vocab_size": 300, "max_position_embeddings": 96, "num_hidden_layers": 2}
    whole = AutoConfig.for_model("gemma3", text_config={"model_type": "gemma3_text", **text})
    whole.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    write_json(tmp_path, content | {"vocab_size": 1, "max_position_embeddings": 1})
    theirs = AutoConfig.from_pretrained(tmp_path).get_text_config(decoder=True)
    read = read_config(tmp_path)
    assert read.model_type == "gemma3"
    assert read.vocab_size == theirs.vocab_size == 300
    assert read.max_positions == theirs.max_position_embeddings == 96
    assert read.need("num_hidden_layers") == theirs.num_hidden_layers
    assert read_model_facts(tmp_path).max_positions == 96


@pytest.mark.parametrize(
    ("generation", "top", "nested", "ids"),
    [([7, 9], 1, 2, (7, 9)), (None, 1, 2, (1,)), (None, None, 2, (2,)), (None, None, None, ())],
)
def test_eos_ids_come_from_the_outermost_file_that_names_any(
    tmp_path: Path, generation: object, top: object, nested: object, ids: tuple[int, ...]
) -> None:
    write_json(tmp_path, {"eos_token_id": generation}, "generation_config.json")
    text = {"eos_token_id": nested}
    write_json(tmp_path, {"model_type": "m", "eos_token_id": top, "text_config": text})
    assert read_config(tmp_path).eos_ids == ids


@pytest.mark.parametrize(("stated", "ids"), [(-1, ()), ([5, -1, 0], (5, 0)), ([], ())])
def test_an_end_that_no_token_has_is_left_out(
    tmp_path: Path, stated: object, ids: tuple[int, ...]
) -> None:
    write_json(tmp_path, LLAMA | {"eos_token_id": stated})
    assert read_config(tmp_path).eos_ids == ids


@pytest.mark.parametrize("stated", ["</s>", "2", [[1, 2]], [1, None], True, 1.5, {"id": 1}])
def test_an_end_that_is_no_token_is_named(tmp_path: Path, stated: object) -> None:
    write_json(tmp_path, LLAMA)
    write_json(tmp_path, {"eos_token_id": stated}, "generation_config.json")
    with pytest.raises(ModelLoadError, match=r"eos_token_id .* neither the number of a token"):
        read_config(tmp_path)


@pytest.mark.parametrize("value", ["4096", 4096.5, True, [1], 2**31, 10**30])
def test_a_count_that_is_no_whole_number_is_named(tmp_path: Path, value: object) -> None:
    write_json(tmp_path, LLAMA | {"max_position_embeddings": value})
    for read in (read_config, read_model_facts):
        with pytest.raises(ModelLoadError, match=r"max_position_embeddings .* no whole number"):
            read(tmp_path)


def test_scaling_makes_sequences_longer_for_everybody(tmp_path: Path) -> None:
    write_json(tmp_path, LLAMA)
    write_json(tmp_path, {"model_max_length": 48}, "tokenizer_config.json")
    scaling = RopeScaling("dynamic", 2.5)
    read, facts = read_config(tmp_path, scaling), read_model_facts(tmp_path, rope=scaling)
    assert read.max_positions == facts.max_positions == 160
    assert read.trained_positions == 64
    assert facts.tokenizer_max_length == 120


def test_values_of_what_writes_the_text_win_but_for_its_type_and_its_ends(tmp_path: Path) -> None:
    assert read_values(tmp_path) is None
    text = {"model_type": "inner", "hidden_size": 8, "bos_token_id": 1, "eos_token_id": 2}
    whole = {"model_type": "outer", "hidden_size": 4, "bos_token_id": 5, "eos_token_id": None}
    write_json(tmp_path, whole | {"text_config": text})
    values = read_values(tmp_path)
    assert values is not None and values.pop("text_config") == text
    assert values == {
        "model_type": "outer", "hidden_size": 8, "bos_token_id": 5, "eos_token_id": 2,
    }  # fmt: skip
    write_json(tmp_path, whole)
    assert read_values(tmp_path) == whole


@pytest.mark.parametrize(
    ("whole", "nested", "kind"),
    [
        ("llava", {"model_type": "mistral"}, "mistral"),
        ("llava", {}, "llama"),
        ("exaone4_5", {"model_type": "exaone4_5_text"}, "exaone4"),  # as it was published
        ("qwen2_vl", None, "qwen2_vl_text"),  # whose folders on the hub nest nothing
        ("llama", None, "llama"),
        ("vision-encoder-decoder", {"model_type": "gpt2"}, "vision-encoder-decoder"),
    ],
)
def test_the_type_of_what_writes_the_text(
    tmp_path: Path, whole: str, nested: dict[str, Any] | None, kind: str
) -> None:
    write_json(tmp_path, {"model_type": whole, "text_config": nested})
    config = read_config(tmp_path)
    assert config.text_type == kind and config.wraps_text == (kind != whole)


# Who names the file, and what for; texts of messages aside.
NAMED = {
    "model/config.py: read_json(folder / 'config.json')",
    "model/gguf/folder.py: {'config.json': config}",  # made of a file's metadata
    "model/gguf/projectors/composite.py: {'config.json': whole | {'text_config': own | "
    "whole.get('text_config', {})}, 'preprocessor_config.json': projector.process(tower) | "
    "normal}",  # and of a projector's beside it
    "hub/composed.py: 'config.json'",  # made of those of a model's repositories
    # Beside a text's numbers, which have the same names.
    "shard/media/ultravox_tower.py: read_json(folder / 'config.json') or {}",
    "hub/folders.py: not (folder / 'config.json').is_file()",
    "shard/quantising/output.py: (staging / 'config.json').write_text(json.dumps({**config, "
    "'quantization_config': description}, indent=2))",  # what is written
    "conversion/lora.py: _rewrite_config(part / 'config.json', plan)",  # a merged model's
    "router/shards/rank_link.py: hashlib.sha256(read_file(folder / 'config.json'))"
    ".hexdigest()",  # what tells one model's folder from another's
    "router/text/own_files.py: (*('tokenizer*', 'special_tokens_map.json', 'added_tokens.json', "
    "'chat_template*'), *('additional_chat_templates/*', 'processor_config.json', 'vocab*', "
    "'merges.txt', 'spiece*'), *('sentencepiece*', 'tekken.json', '*.tiktoken', 'tiktoken.model', "
    "'config.json', GENERATION))",  # where a folder's files come from
    "router/text/tokenizer_files.py: ('config.json', 'tokenizer_config.json', "
    "'special_tokens_map.json', '*.py')",  # what a converted tokenizer may depend on
}


def uses(tree: ast.Module) -> Iterator[str]:
    """Yield the expressions with the name of the file in them, but for texts that it is put in."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value == "config.json":
            whole: ast.AST = node
            while isinstance(parents[whole], ast.expr | ast.FormattedValue):
                whole = parents[whole]
                if isinstance(whole, ast.JoinedStr):
                    break
            else:
                yield ast.unparse(whole)


def test_nobody_else_reads_config_json() -> None:
    package = Path(tgi_trio.__file__).parent
    found = {
        f"{path.relative_to(package)}: {use}"
        for path in package.rglob("*.py")
        if b"config.json" in path.read_bytes()
        for use in uses(ast.parse(path.read_bytes()))
    }
    assert found == NAMED


def test_the_search_sees_readers() -> None:
    code = """
def f(folder):
    name = "config.json"
    if json.loads((folder / "config.json").read_text()):
        raise ModelLoadError(f"{folder / 'config.json'} is damaged")
"""
    assert list(uses(ast.parse(code))) == [
        "'config.json'",
        "json.loads((folder / 'config.json').read_text())",
    ]


@pytest.mark.parametrize(
    ("make", "why"), [(Path.mkdir, "Is a directory"), (os.mkfifo, "nobody writes to the pipe")]
)
def test_a_config_that_is_no_file_is_told_once(
    tmp_path: Path, make: Callable[[Path], None], why: str
) -> None:
    path = tmp_path / "config.json"
    make(path)
    with pytest.raises(ModelLoadError, match=f"^{re.escape(str(path))} cannot be read: {why}$"):
        read_config(tmp_path)
