"""Names of a vision tower's tensors in older and newer checkpoints of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# Prefixes of tensor names in transformers' classes, and the same in older files, or in MLX's.
_OLDER: Final = (
    ("visual.", "vision_tower."),
    ("vision_tower.", "vision_tower.vision_model."),
    ("language_model.", "language_model.model."),
    ("audio_tower.", "encoder."),  # of Whisper, whose folders Ultravox names for its tower
)
# Parts of names in these classes, and in files that have all of the others of their line.
_WORDS: Final = (
    (  # LFM3-VL
        ("patch_embed.", "patchifier."),
        ("q_norm.", "q_layernorm."),
        ("k_norm.", "k_layernorm."),
    ),
    (("embed_vision.", "vision_embedder."),),  # Gemma 4's unified model
    (("embed_vision.multimodal_embedder.", "embed_vision."),),
    (  # HunyuanOCR, as it is published
        ("vision_tower.", "vit."),
        ("mlp.fc1.", "mlp.dense_h_to_4h."),
        ("mlp.fc2.", "mlp.dense_4h_to_h."),
        ("layer_norm1.", "input_layernorm."),
        ("layer_norm2.", "post_attention_layernorm."),
        ("patch_merger.proj_conv.", "perceive.proj.0."),
        ("patch_merger.proj_out.", "perceive.proj.2."),
        ("patch_merger.", "perceive."),
    ),
    (  # InternVL, as it is published
        ("embeddings.cls_token", "embeddings.class_embedding"),
        ("embeddings.patch_embeddings.projection.", "embeddings.patch_embedding."),
        ("embeddings.position_embeddings", "embeddings.position_embedding"),
        ("vision_tower.encoder.layer.", "vision_tower.encoder.layers."),
        ("vision_tower.layers.", "vision_tower.encoder.layers."),  # Qianfan-OCR's class
        ("vision_tower.", "vision_model."),
        ("attention.projection_layer.", "attention.proj."),
        ("attention.", "attn."),
        ("layernorm_before.", "norm1."),
        ("layernorm_after.", "norm2."),
        ("lambda_", "ls"),
        ("multi_modal_projector.layer_norm.", "mlp1.0."),
        ("multi_modal_projector.linear_1.", "mlp1.1."),
        ("multi_modal_projector.linear_2.", "mlp1.3."),
    ),
    (  # Nemotron 3 Nano Omni, as it is published
        ("vision_model.embeddings.", "vision_model.radio_model.model.patch_generator."),
        ("video_patch_projection.", "video_embedder."),
        ("patch_projection.", "embedder."),
        ("position_embedding", "pos_embed"),
        ("cls_register_token", "cls_token.token"),
        ("vision_model.encoder.layer.", "vision_model.radio_model.model.blocks."),
        ("attention.o_proj.", "attn.proj."),
        ("attention.", "attn."),
        ("multi_modal_projector.layer_norm.", "mlp1.0."),
        ("multi_modal_projector.linear_1.", "mlp1.1."),
        ("multi_modal_projector.linear_2.", "mlp1.3."),
    ),
    (("vision_final_layernorm.", "vision_projector.vision_final_layernorm."),),  # likewise
    (("projector.", "mlp_AR."),),  # PaddleOCR-VL
    (("projector.", "vision_projector."),),  # HyperCLOVA X SEED Think
    (  # Kimi K2.5
        ("vision_tower.layers.", "vision_tower.encoder.blocks."),
        ("vision_tower.final_layernorm.", "vision_tower.encoder.final_layernorm."),
        ("norm1.", "norm0."),
        ("norm2.", "norm1."),
        ("mlp.fc1.", "mlp.fc0."),
        ("mlp.fc2.", "mlp.fc1."),
        ("attn.proj.", "wo."),
        ("pos_emb.position_embeddings", "pos_emb.weight"),
        ("mm_projector.in_proj.", "mm_projector.proj.0."),
        ("mm_projector.out_proj.", "mm_projector.proj.2."),
    ),
    (  # MiniMax-M3
        ("vision_tower.embeddings.proj.", "vision_tower.vision_model.embeddings.patch_embedding."),
        ("vision_tower.layers.", "vision_tower.vision_model.encoder.layers."),
        ("multi_modal_projector.merge_linear_", "patch_merge_mlp.linear_"),
    ),
    (  # Mistral Large 4
        ("vision_tower.", "vision_encoder."),
        ("attention.q_proj.", "attention.wq."),
        ("attention.k_proj.", "attention.wk."),
        ("attention.v_proj.", "attention.wv."),
        ("attention.o_proj.", "attention.wo."),
        ("feed_forward.gate_proj.", "feed_forward.w1."),
        ("feed_forward.down_proj.", "feed_forward.w2."),
        ("feed_forward.up_proj.", "feed_forward.w3."),
        ("multi_modal_projector.norm.", "pre_mm_projector_norm."),
        ("multi_modal_projector.patch_merger.", "patch_merger."),
        ("multi_modal_projector.linear_1.", "vision_language_adapter.w_in."),
        ("multi_modal_projector.linear_2.", "vision_language_adapter.w_out."),
    ),
    (  # Phi-4-multimodal, as it was published first
        ("feed_forward_in.gate_up_proj.", "feed_forward_in.net.0.linear."),
        ("feed_forward_in.down_proj.", "feed_forward_in.net.2."),
        ("feed_forward_out.gate_up_proj.", "feed_forward_out.net.0.linear."),
        ("feed_forward_out.down_proj.", "feed_forward_out.net.2."),
        ("self_attn.q_proj.", "self_attn.linear_q."),
        ("self_attn.k_proj.", "self_attn.linear_k."),
        ("self_attn.v_proj.", "self_attn.linear_v."),
        ("self_attn.o_proj.", "self_attn.linear_out."),
        ("image_embed.img_projection_up.", "image_embed.img_projection.0."),
        ("image_embed.img_projection_down.", "image_embed.img_projection.2."),
        ("image_embed.global_img_feature_extensor", "image_embed.glb_GN"),
        ("image_embed.sub_img_feature_extensor", "image_embed.sub_GN"),
        ("audio_embed.up_proj_for_speech.", "audio_embed.audio_projection.speech.0."),
        ("audio_embed.down_proj_for_speech.", "audio_embed.audio_projection.speech.2."),
        ("audio_embed.up_proj_for_vision_speech.", "audio_embed.audio_projection.vision.0."),
        ("audio_embed.down_proj_for_vision_speech.", "audio_embed.audio_projection.vision.2."),
    ),
    (  # Qwen3-ASR, as it was published first
        ("multi_modal_projector.linear_1.", "audio_tower.proj1."),
        ("multi_modal_projector.linear_2.", "audio_tower.proj2."),
    ),
    (  # DeepSeek-OCR 1 and 2
        ("vision_tower.sam_encoder.", "sam_model."),
        (".layers.", ".blocks."),
        (".layer_norm1.", ".norm1."),
        (".layer_norm2.", ".norm2."),
        ("patch_embed.projection.", "patch_embed.proj."),
        ("neck.conv1.", "neck.0."),
        ("neck.norm1.", "neck.1."),
        ("neck.conv2.", "neck.2."),
        ("neck.norm2.", "neck.3."),
        ("sam_model.proj.conv1.", "sam_model.net_2."),
        ("sam_model.proj.conv2.", "sam_model.net_3."),
    ),
    (
        ("vision_tower.vision_encoder.encoder.", "vision_model.transformer."),
        ("vision_tower.vision_encoder.", "vision_model."),
        ("multi_modal_projector.", "projector.layers."),
        ("view_separator", "view_seperator"),
    ),
    (
        ("vision_tower.vision_encoder.", "qwen2_model.model.model."),
        ("vision_tower.query_768_resolution.", "qwen2_model.query_768."),
        ("vision_tower.query_1024_resolution.", "qwen2_model.query_1024."),
    ),
    (  # Step 3.7
        ("embeddings.patch_embedding.", "conv1."),
        ("embeddings.position_embedding.weight", "positional_embedding"),
        ("pre_layernorm.", "ln_pre."),
        ("vision_model.layers.", "vision_model.transformer.resblocks."),
        ("self_attn.", "attn."),
        ("layernorm_before.", "ln_1."),
        ("layernorm_after.", "ln_2."),
        ("lambda_1", "ls_1.gamma"),
        ("lambda_2", "ls_2.gamma"),
        ("mlp.fc1.", "mlp.c_fc."),
        ("mlp.fc2.", "mlp.c_proj."),
        ("downsampler", "vit_downsampler"),
        ("multi_modal_projector.", "vit_large_projector."),
    ),
)


def spellings(name: str) -> Iterator[str]:
    """Yield the possible names in a checkpoint of the tensor `name` of a transformers class."""
    names = [name]
    names += [old + name.removeprefix(new) for new, old in _OLDER if name.startswith(new)]
    for words in _WORDS:
        reworded = name
        for word, other in words:
            reworded = reworded.replace(word, other)
        names.append(reworded)
    for own in dict.fromkeys(names):
        yield f"model.{own}"
        yield own
        yield f"thinker.{own}"  # of models that speak as well
