"""A tiny Ultravox in as many folders as it has repositories, and the answers that it has to give.

transformers has no class of it. The oracle is its text and Whisper's encoder, both of transformers,
with what lies between them written here as fixie-ai's model and processor have it: a piece of 3000
frames, filled up where there are several, is heard with a mask, all rows are stacked and projected,
and as many are taken as there are tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoderLayer

from tgi_trio.testing.checkpoints import fill_parameters, make_checkpoint, make_tokenizer

STACK, CONTEXT = 8, 3000
TOWER: dict[str, Any] = {
    **{"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 16},
    **{"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16},
    **{"num_mel_bins": 8, "vocab_size": 64, "max_target_positions": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
_HIDDEN = 48  # of the projector
# What config.json says of the projector, by the version that published such first.
VERSIONS: dict[str, dict[str, Any]] = {
    "0.4": {"projector_act": "swiglu", "projector_ln_mid": False},
    "0.5": {"projector_act": "swiglu", "projector_ln_mid": True},
    "gelu": {"projector_act": "gelu", "projector_ln_mid": True},
    "0.7": {"num_projector_layers": 2},
}


class Projector(nn.Module):
    """The projector of a version, on stacked rows [1, N, stacked]."""

    def __init__(self, version: str, tower: WhisperConfig, text: int) -> None:
        super().__init__()
        said, stacked = VERSIONS[version], STACK * tower.d_model
        self.ln_pre = LlamaRMSNorm(stacked, eps=1e-6)
        self.version, self.between = version, bool(said.get("projector_ln_mid"))
        if version == "0.7":
            self.linear_in = nn.Linear(stacked, tower.d_model)
            self.embed_positions = nn.Embedding(tower.max_source_positions, tower.d_model)
            self.layers = nn.ModuleList([WhisperEncoderLayer(tower) for _ in range(2)])
            self.ln_post = LlamaRMSNorm(tower.d_model, eps=1e-6)
            self.linear_out = nn.Linear(tower.d_model, text)
            return
        inner = _HIDDEN // 2 if said["projector_act"] == "swiglu" else _HIDDEN
        self.linear_1 = nn.Linear(stacked, _HIDDEN, bias=False)
        self.linear_2 = nn.Linear(inner, text, bias=False)
        self.norm = LlamaRMSNorm(inner if self.between else text, eps=1e-6)

    def forward(self, stacked: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return features [tokens, text]."""
        rows = self.ln_pre(stacked)
        if self.version == "0.7":
            rows = self.linear_in(rows)
            rows = rows + self.embed_positions(torch.arange(rows.shape[1]))
            for layer in self.layers:
                rows = layer(rows, _hide(rows.shape[1], tokens))
            return self.linear_out(self.ln_post(rows))[0, :tokens]
        rows = self.linear_1(rows)
        if self.version == "gelu":
            rows = functional.gelu(rows)
        else:
            rows, gate = rows.chunk(2, dim=-1)
            rows = functional.silu(gate) * rows
        if self.between:
            return self.linear_2(self.norm(rows))[0, :tokens]
        return self.norm(self.linear_2(rows))[0, :tokens]


@dataclass(frozen=True)
class Ultravox:
    """A model in folders, and what answers for it."""

    folder: Path  # of its own repository, which names the others
    text_folder: Path
    tower_folder: Path
    whisper: Any
    projector: Projector
    text: Any
    tokenizer: Any

    @torch.no_grad()
    def hear(self, samples: NDArray[np.float32]) -> torch.Tensor:
        """Return the features [N, text] of a sound."""
        filled = np.pad(samples, (0, max(0, 320 - len(samples))))
        made = extractor()(
            [filled], sampling_rate=16_000, padding="longest", pad_to_multiple_of=160,
            truncation=False, return_attention_mask=True, return_tensors="np",
        )  # fmt: skip
        features = torch.from_numpy(made["input_features"])
        length = int(made["attention_mask"].sum())
        rows = []
        for begin in range(0, length, CONTEXT):
            piece = features[..., begin : begin + CONTEXT]
            frames = min(length - begin, CONTEXT)
            if begin:
                piece = functional.pad(piece, (0, CONTEXT - piece.shape[-1]))
            rows.append(self._hear_piece(piece, frames))
        return torch.cat(rows)

    def _hear_piece(self, features: torch.Tensor, frames: int) -> torch.Tensor:
        encoder = self.whisper.model.encoder
        rows = functional.gelu(encoder.conv1(features))
        rows = functional.gelu(encoder.conv2(rows)).permute(0, 2, 1)
        rows = rows + encoder.embed_positions.weight[: rows.shape[1]]
        for layer in encoder.layers:
            rows = layer(rows, _hide(rows.shape[1], (frames - 1) // 2 + 1))
        rows = encoder.layer_norm(rows)
        rows = functional.pad(rows, (0, 0, 0, -rows.shape[1] % STACK))
        stacked = rows.reshape(1, rows.shape[1] // STACK, -1)
        return self.projector(stacked, -(-frames // (2 * STACK)))

    @torch.no_grad()
    def generate(
        self, content: str, *sounds: NDArray[np.float32], most: int
    ) -> tuple[list[int], list[int]]:
        """Return ids and greedy tokens of a message with `<|audio|>` for each sound.

        As its processor has them: texts around sounds are tokenised each by itself, and features
        stand in the places of EOS.
        """
        turns = [{"role": "user", "content": content}]
        written = self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, tokenize=False
        )
        first, *rest = (
            self.tokenizer(each, add_special_tokens=False)["input_ids"]
            for each in written.split("<|audio|>")
        )
        embed = self.text.get_input_embeddings()
        ids, embedded = list(first), [embed(torch.tensor(first, dtype=torch.long))]
        for sound, more in zip(sounds, rest, strict=True):
            heard = self.hear(sound)
            embedded += [heard, embed(torch.tensor(more, dtype=torch.long))]
            ids += [self.tokenizer.eos_token_id] * len(heard) + more
        found = self.text.generate(
            inputs_embeds=torch.cat(embedded)[None], max_new_tokens=most, do_sample=False,
            pad_token_id=2,
        )  # fmt: skip
        return ids, found[0].tolist()


def _hide(count: int, seen: int) -> torch.Tensor:
    """Return a mask that is added to scores [1, 1, count, count]: the first `seen` are seen."""
    hidden = torch.arange(count) >= seen
    return torch.zeros(1, 1, count, count).masked_fill(hidden, torch.finfo(torch.float32).min)


def extractor() -> Any:
    """Return the feature extractor, which computes as where torch is not installed."""
    made: Any = WhisperFeatureExtractor(feature_size=TOWER["num_mel_bins"])
    made._torch_extract_fbank_features = made._np_extract_fbank_features
    return made


def make_ultravox(
    root: Path, version: str = "0.5", *, text: str = "llama", own_tower: bool = False, **said: Any
) -> Ultravox:
    """Write a random model; `text`: a model type of transformers.

    `own_tower`: the tower is in its own repository, as of those that were trained further, without
    positions, which are not trained. `said`: more of its config.json.
    """
    text_folder = make_checkpoint(root / "text", text)
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    language: Any = AutoModelForCausalLM.from_pretrained(text_folder, dtype=torch.float32).eval()
    language.generation_config.eos_token_id = None
    whisper: Any = WhisperForConditionalGeneration(WhisperConfig(**TOWER)).eval()
    positions = whisper.model.encoder.embed_positions.weight.clone()
    fill_parameters(whisper, 1, False)
    with torch.no_grad():
        whisper.model.encoder.embed_positions.weight.copy_(positions)
    whisper.save_pretrained(root / "whisper")
    WhisperFeatureExtractor(feature_size=TOWER["num_mel_bins"]).save_pretrained(root / "whisper")
    width = language.get_input_embeddings().weight.shape[1]
    projector = Projector(version, whisper.model.encoder.config, width).eval()
    fill_parameters(projector, 2, False)

    folder = root / "ultravox"
    folder.mkdir()
    make_tokenizer(folder)
    config = {
        **{"architectures": ["UltravoxModel"], "model_type": "ultravox", "vocab_size": 512},
        **{"hidden_size": _HIDDEN, "stack_factor": STACK, "text_model_id": str(text_folder)},
        **{"audio_token_index": 10**6, **VERSIONS[version]},
        "auto_map": {  # code that published folders bring, and that is not there
            "AutoConfig": "ultravox_config.UltravoxConfig",
            "AutoModel": "ultravox_model.UltravoxModel",
            "AutoProcessor": "ultravox_processing.UltravoxProcessor",
        },
    }
    norm = "ln_mid." if projector.between else "ln_post."
    named = {re.sub(r"^norm\.", norm, n): t for n, t in projector.state_dict().items()}
    tensors = {f"multi_modal_projector.{n}": t for n, t in named.items()}
    if own_tower:
        tower = whisper.model.encoder.state_dict()
        tensors |= {f"audio_tower.{n}": t for n, t in tower.items() if "embed_pos" not in n}
        config |= {"audio_config": {"model_type": "whisper", **TOWER}, "audio_model_id": None}
    else:
        config["audio_model_id"] = str(root / "whisper")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | said))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return Ultravox(folder, text_folder, root / "whisper", whisper, projector, language, tokenizer)
