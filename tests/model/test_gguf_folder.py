"""A GGUF file as a model folder: config, tokenizer, chat template, ends of texts, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from tests.model.support import Asked
from tests.model.tiny_gguf import SHAPES, TINY, Changes, read, tiny
from tests.router.text.kinds import CORPUS
from tests.support.gguf_files import write_llama, write_parts
from tgi_trio import demo
from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.model.facts import read_model_facts
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.router.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(demo.model_path(), tmp_path_factory.mktemp("gguf") / "embedded.gguf")


def test_the_config_is_that_of_the_source(embedded: Path, tmp_path: Path) -> None:
    source, made = read_config(demo.model_path()), read_config(gguf_folder(embedded, tmp_path))
    for name in ("model_type", "vocab_size", "max_positions", "dtype"):
        assert getattr(made, name) == getattr(source, name)
    assert set(made.eos_ids) == set(source.eos_ids)
    for name in ("hidden_size", "num_key_value_heads", "head_dim", "tie_word_embeddings"):
        assert made.get(name) == source.get(name)
    assert made.get("rms_norm_eps") == pytest.approx(source.get("rms_norm_eps"))
    assert check_model(made, Asked()) == []


def test_the_tokenizer_is_that_of_the_source(embedded: Path, tmp_path: Path) -> None:
    made = gguf_folder(embedded, tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(demo.model_path() / "tokenizer.json"))
    ours = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    assert ours.get_vocab() == theirs.get_vocab()
    sources = sorted(Path(demo.__file__).parent.glob("*.py"))
    texts = [*CORPUS, *(path.read_text() for path in sources)]
    texts += ["", " ", "12345 a1b2", "<|user|>What?<|end|>", "a\n\n  b\t", "日本語 🙂 é"]
    for text in texts:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special).ids == expected
            assert ours.decode(expected) == theirs.decode(expected)
    words, source = (
        read(made, "tokenizer_config.json"),
        read(demo.model_path(), "tokenizer_config.json"),
    )
    assert words["bos_token"] == source["bos_token"] and words["eos_token"] == source["eos_token"]
    assert words["chat_template"] == [{"name": "default", "template": source["chat_template"]}]


def test_texts_end_at_every_token_that_ends_a_turn(tmp_path: Path) -> None:
    changes = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "<|im_end|>", "<end_of_turn|>"],
        "tokenizer.ggml.token_type": [3, 3, 1, 3, 3],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.eot_token_id": 2,
    }
    folder = gguf_folder(tiny(tmp_path, changes), tmp_path / "cache")
    assert read_config(folder).eos_ids == (1, 2, 3)


@pytest.mark.parametrize("kind", [1, 4])  # a normal token, and one that the user has defined
def test_a_token_that_ends_a_turn_is_special_whatever_the_file_says(
    tmp_path: Path, kind: int
) -> None:
    changes = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "<|im_end|>", "b"],
        "tokenizer.ggml.token_type": [3, 3, 1, kind, 1],
        "tokenizer.ggml.merges": None,
    }
    folder = gguf_folder(tiny(tmp_path, changes), tmp_path / "cache")
    assert read_config(folder).eos_ids == (1, 3)
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode_ids("a<|im_end|>b", add_special_tokens=False).tolist()
    assert ids == [2, 3, 4]
    assert tokenizer.decode(ids) == "ab"


@pytest.mark.parametrize(
    ("others", "ends"),
    [
        (("<|return|>", "<|call|>"), (1, 3, 4)),  # gpt-oss
        (("<|flush|>", "<|calls|>"), (1, 3, 4)),  # Solar Open
        (("<|user|>", "<|call|>"), (1, 2, 4)),
    ],
)
def test_a_message_within_a_turn_does_not_end_it(
    tmp_path: Path, others: tuple[str, str], ends: tuple[int, ...]
) -> None:
    """gpt-oss ends its thoughts with a token that ends a whole turn of others."""
    changes = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "<|end|>", *others],
        "tokenizer.ggml.token_type": [3] * 5,
        "tokenizer.ggml.merges": None,
    }
    folder = gguf_folder(tiny(tmp_path, changes), tmp_path / "cache")
    assert read_config(folder).eos_ids == ends


REFUSED: dict[str, tuple[Changes, Changes, str]] = {
    "architecture": ({"general.architecture": "bert"}, {}, "architecture 'bert', which is not"),
    "no architecture": ({"general.architecture": None}, {}, "architecture ''"),
    "no layers stated": ({"llama.block_count": None}, {}, "has no llama.block_count"),
    "2^31 layers": ({"llama.block_count": (1 << 31) - 1}, {}, "block_count"),
    "no heads": ({"llama.attention.head_count": 0}, {}, "head_count cannot be 0"),
    "heads in words": ({"llama.attention.head_count": "two"}, {}, "head_count is 'two'"),
    "heads by layer": ({"llama.attention.head_count_kv": [1, 2]}, {}, "head_count_kv is"),
    "values of another length": (
        {"llama.attention.key_length": 4, "llama.attention.value_length": 8},
        {},
        "different lengths",
    ),
    "scaling": ({"llama.rope.scaling.type": "new", "llama.rope.scaling.factor": 2.0}, {}, "'new'"),
    "more turned than there is": ({"llama.rope.dimension_count": 64}, {}, "turns 64 of 4"),
    "tokenizer": ({"tokenizer.ggml.model": "rwkv"}, {}, "'rwkv'.*--tokenizer-name"),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "next"}, {}, "'next'.*--tokenizer-name"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, {}, "tokenizer.ggml.tokens.*--tokenizer-name"),
    "types": ({"tokenizer.ggml.token_type": [1]}, {}, "not as long as its tokens"),
    "merge": ({"tokenizer.ggml.merges": ["ab"]}, {}, "merge 'ab'"),
    "merge of three": ({"tokenizer.ggml.merges": ["a b", "a b a"]}, {}, "merge 'a b a'"),
    "merge of nothing": ({"tokenizer.ggml.merges": ["a "]}, {}, "merge 'a '"),
    "scores": ({"tokenizer.ggml.model": "llama"}, {}, "scores are not as many"),
    "scores in words": (
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": ["x"] * 5},
        {},
        "scores are not",
    ),
    "2^31 experts": (
        {"llama.expert_count": 1 << 31, "llama.expert_used_count": 2},
        {"blk.0.ffn_up_exps.weight": (2, 16, 8)},
        "2 of 2147483648 experts",
    ),
    "experts without tensors": ({"llama.expert_count": 4}, {}, "no tensor 'blk.0.ffn_up_exps"),
    "frequencies": ({}, {"rope_freqs.weight": (7,)}, "no table of 2 numbers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, more, reason = REFUSED[case]
    with pytest.raises(ModelLoadError, match=rf"tiny\.gguf .*{reason}"):
        gguf_folder(tiny(tmp_path, changes, more), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"blk.0.ffn_up.weight": None}, "'model.layers.0.mlp.up_proj.weight' is missing"),
        ({"blk.0.extra.weight": (8,)}, "'blk.0.extra.weight' in .*tiny.gguf is no part"),
        ({"blk.1.attn_q.weight": (8, 8)}, "is no part of a model"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, more: Changes, reason: str) -> None:
    folder = gguf_folder(tiny(tmp_path, more=more), tmp_path / "cache")
    with pytest.raises(ModelLoadError, match=reason):
        check_model(read_config(folder), Asked())


def test_frequencies_of_their_own_are_read(tmp_path: Path) -> None:
    file = tiny(tmp_path, more={"rope_freqs.weight": (2,)})
    config = read_config(gguf_folder(file, tmp_path / "cache"))
    scaling = config.get("rope_scaling")
    assert scaling["rope_type"] == "longrope" and scaling["attention_factor"] == 1.0
    assert scaling["short_factor"] == scaling["long_factor"] == [1.0, 1.0]
    assert check_model(config, Asked()) == []


def test_a_flag_that_contradicts_the_file_is_refused_with_both_names(tmp_path: Path) -> None:
    quantised = write_llama(demo.model_path(), tmp_path / "small.gguf", quantised=True)
    plain = write_llama(demo.model_path(), tmp_path / "plain.gguf")
    serving = Asked(quantize="eetq")
    with pytest.raises(ConfigurationError, match=r"--quantize eetq contradicts small\.gguf.* Q8_0"):
        check_model(read_config(gguf_folder(quantised, tmp_path / "cache")), serving)
    assert check_model(read_config(gguf_folder(plain, tmp_path / "cache")), serving) == []


def test_a_flag_may_say_that_a_file_is_gguf(tmp_path: Path) -> None:
    quantised = write_llama(demo.model_path(), tmp_path / "small.gguf", quantised=True)
    folder = gguf_folder(quantised, tmp_path / "cache")
    assert read_model_facts(folder).quantize == "gguf"
    assert check_model(read_config(folder), Asked(quantize="gguf")) == []
    plain = gguf_folder(write_llama(demo.model_path(), tmp_path / "plain.gguf"), tmp_path / "cache")
    assert read_model_facts(plain).quantize is None
    with pytest.raises(ConfigurationError, match=r"--quantize gguf .* holds plain numbers"):
        check_model(read_config(plain), Asked(quantize="gguf"))


def test_a_folder_is_made_once_and_anew_for_another_file(embedded: Path, tmp_path: Path) -> None:
    first = gguf_folder(embedded, tmp_path)
    written = (first / "tokenizer.json").stat().st_mtime_ns
    assert gguf_folder(embedded, tmp_path) == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == written
    assert {path.name for path in tmp_path.iterdir()} == {first.name}  # nothing is left over
    bare = gguf_folder(embedded, tmp_path, tokenizer=False)
    assert bare != first and not (bare / "tokenizer.json").exists()
    changed = write_llama(demo.model_path(), tmp_path / "e.gguf", {"llama.context_length": 512})
    assert read_config(gguf_folder(changed, tmp_path / "cache")).max_positions == 512
    write_llama(demo.model_path(), changed)
    assert read_config(gguf_folder(changed, tmp_path / "cache")).max_positions == 1024


def test_a_split_model_is_one(tmp_path: Path) -> None:
    files = write_parts(demo.model_path(), tmp_path, 3)
    folder = gguf_folder(files[1], tmp_path / "cache")
    assert folder == gguf_folder(files[0], tmp_path / "cache")
    assert check_model(read_config(folder), Asked()) == []
    files[2].unlink()
    with pytest.raises(ModelLoadError, match=r"lacks model-00003-of-00003\.gguf"):
        gguf_folder(files[0], tmp_path / "cache")


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    files = write_parts(demo.model_path(), tmp_path, 2)
    files[1].write_bytes(files[0].read_bytes())
    with pytest.raises(ModelLoadError, match="says that it is part 0"):
        gguf_folder(files[0], tmp_path / "cache")


@pytest.mark.parametrize("layers", [32, 40])
def test_baichuans_larger_model_has_linear_biases(tmp_path: Path, layers: int) -> None:
    changes: Changes = {"general.architecture": "baichuan"}
    changes |= {key.replace("llama.", "baichuan."): TINY[key] for key in TINY if "llama." in key}
    changes |= dict.fromkeys((key for key in TINY if "llama." in key), None)
    changes["baichuan.block_count"] = layers
    more = {
        name.replace(".0.", f".{layer}."): shape
        for layer in range(1, layers)
        for name, shape in SHAPES.items()
    }
    spec = decoder_spec(read_config(gguf_folder(tiny(tmp_path, changes, more), tmp_path / "cache")))
    assert spec is not None and spec.alibi == (layers == 40)
    assert all((layer.rotary is None) == (layers == 40) for layer in spec.layers)
