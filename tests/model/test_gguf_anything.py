"""Whatever a GGUF file says is served or refused, for any architecture."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model.support import Asked
from tests.model.tiny_gguf import TINY, Changes, tiny
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.model.gguf.architectures import ARCHITECTURES
from tgi_trio.model.gguf.folder import gguf_folder

ANYTHING = st.one_of(
    st.booleans(),
    st.integers(-(1 << 31), 1 << 62),
    st.floats(width=32),
    st.text(max_size=5),
    st.lists(st.integers(0, 9), max_size=6),
    st.lists(st.text(max_size=3), max_size=6),
    st.lists(st.floats(width=32), max_size=6),
)
MORE_KEYS = (
    "llama.vocab_size", "llama.rope.dimension_count", "llama.rope.freq_base",
    "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear",
    "llama.rope.scaling.original_context_length", "llama.attention.key_length",
    "llama.attention.value_length", "llama.expert_count", "llama.expert_used_count",
    "tokenizer.ggml.scores", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.unknown_token_id", "tokenizer.chat_template", "split.count", "split.no",
    "tokenizer.ggml.eot_token_id",
)  # fmt: skip


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=st.dictionaries(st.sampled_from([*TINY, *MORE_KEYS]), ANYTHING, max_size=3))
def test_any_metadata_is_served_or_refused(tmp_path: Path, changes: Changes) -> None:
    try:
        config = read_config(gguf_folder(tiny(tmp_path, changes), tmp_path / "cache"))
        check_model(config, Asked())
    except ModelLoadError as error:
        assert str(error)


KEYS = (
    "attention.head_count_kv", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
    "attention.sliding_window", "attention.sliding_window_pattern", "attention.clamp_kqv",
    "attention.max_alibi_bias", "attention.kv_lora_rank", "attention.q_lora_rank",
    "attention.key_length_mla", "attention.value_length_mla", "attention.scale", "logit_scale",
    "embedding_scale", "residual_scale", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.yarn_log_multiplier", "use_parallel_residual",
    "expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count",
    "expert_shared_count", "expert_feed_forward_length", "expert_gating_func",
    "expert_weights_norm", "expert_weights_scale", "leading_dense_block_count",
    "nextn_predict_layers", "interleave_moe_layer_step", "shortconv.l_cache", "ssm.conv_kernel",
    "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size", "kda.head_dim",
    "ssm.dt_b_c_rms", "full_attention_interval", "attention.recurrent_layers", "block_count",
    "attention.shared_kv_layers", "attention.key_length_swa", "rope.dimension_count_swa",
    "rope.freq_base_swa", "embedding_length_per_layer_input", "activation_sparsity_scale",
    "altup.num_inputs", "altup.active_idx", "final_logit_softcapping", "attention.key_length",
    "attention.value_length", "attention.value_scale", "attention.temperature_scale",
    "feed_forward_length", "attention.head_count",
)  # fmt: skip
NAMES = (
    "attn_qkv.weight", "attn_qkv.bias", "attn_norm_2.weight", "attn_q_norm.weight",
    "ffn_up_exps.weight", "ffn_up_shexp.weight", "attn_k_b.weight", "attn_v_b.weight",
    "exp_probs_b.bias", "ffn_gate_inp.weight", "ffn_gate_up_exps.weight", "ssm_in.weight",
    "ssm_conv1d.weight", "ssm_a", "ssm_norm.weight", "laurel_l.weight", "ffn_latent_down.weight",
    "attn_q_a.weight", "ssm_in.bias", "attn_q.bias",
)  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(sorted(ARCHITECTURES)),
    said=st.dictionaries(st.sampled_from(KEYS), st.integers(1, 4) | ANYTHING, max_size=12),
    shapes=st.dictionaries(
        st.sampled_from(NAMES), st.lists(st.integers(1, 8), min_size=1, max_size=3), max_size=6
    ),
)
def test_anything_said_of_any_architecture_is_served_or_refused(
    tmp_path: Path, name: str, said: Changes, shapes: dict[str, list[int]]
) -> None:
    changes = {key.replace("llama", name): value for key, value in TINY.items()}
    changes |= {"general.architecture": name} | {f"{name}.{key}": v for key, v in said.items()}
    more = {f"blk.0.{key}": tuple(shape) for key, shape in shapes.items()}
    metadata = dict.fromkeys(TINY) | changes
    try:
        config = read_config(gguf_folder(tiny(tmp_path, metadata, more), tmp_path / "cache"))
        check_model(config, Asked())
    except ModelLoadError as error:
        assert str(error)
