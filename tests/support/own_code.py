"""Writes model folders that bring their own Python code, as many on the hub do."""

from __future__ import annotations

import json
from pathlib import Path

from tgi_trio.testing.checkpoints import make_checkpoint

CONFIGURATION = """
from transformers import PretrainedConfig

class WaveConfig(PretrainedConfig):
    model_type = "wave"

    def __init__(self, vocab_size=512, hidden_size=64, num_hidden_layers=2, window=24, **kwargs):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.window = num_hidden_layers, window
        super().__init__(**kwargs)
"""

# A recurrence that nobody else has: a running sum that turns, per layer. It keeps no usable cache.
MODELING = """
import os
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_wave import WaveConfig

if "WAVE_WITNESS" in os.environ:
    with Path(os.environ["WAVE_WITNESS"]).open("a") as file:
        file.write(f"{os.getpid()}\\n")

class WaveForCausalLM(PreTrainedModel):
    config_class = WaveConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.turns = torch.nn.ModuleList(
            torch.nn.Linear(config.hidden_size, config.hidden_size)
            for _ in range(config.num_hidden_layers)
        )
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, use_cache=None, return_dict=None, **kwargs):
        hidden = self.embed(input_ids)
        count = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
        for turn in self.turns:
            hidden = hidden + torch.sin(turn(hidden.cumsum(1) / count))
        return CausalLMOutput(logits=self.head(hidden))
"""

TOKENIZATION = """
import os
from pathlib import Path

from transformers import PreTrainedTokenizerFast

if "WAVE_WITNESS" in os.environ:
    with Path(os.environ["WAVE_WITNESS"]).open("a") as file:
        file.write(f"{os.getpid()}\\n")

class WaveTokenizer(PreTrainedTokenizerFast):
    def __init__(self, **kwargs):
        kwargs["tokenizer_file"] = str(Path(kwargs.pop("name_or_path")) / "words.data")
        super().__init__(**kwargs)
"""


def write_wave_model(folder: Path) -> Path:
    """Write a checkpoint of a type that nobody knows, with the code that does; return `folder`.

    Its weights are drawn with a seed; the tokenizer is that of other tiny checkpoints.
    """
    import torch
    from safetensors.torch import save_file

    make_checkpoint(folder, "llama")  # for its tokenizer
    for name in ("model.safetensors", "generation_config.json"):
        (folder / name).unlink()
    (folder / "configuration_wave.py").write_text(CONFIGURATION)
    (folder / "modeling_wave.py").write_text(MODELING)
    config = {
        "model_type": "wave",
        "architectures": ["WaveForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_wave.WaveConfig",
            "AutoModelForCausalLM": "modeling_wave.WaveForCausalLM",
        },
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "embed.weight": torch.randn(512, 64, generator=generator),
        "head.weight": torch.randn(512, 64, generator=generator),
    }
    for layer in range(2):
        tensors[f"turns.{layer}.weight"] = torch.randn(64, 64, generator=generator)
        tensors[f"turns.{layer}.bias"] = torch.randn(64, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def use_tokenizer_code(folder: Path) -> None:
    """Have the tokenizer be Python code that reads a file of its own."""
    (folder / "tokenizer.json").rename(folder / "words.data")
    (folder / "tokenization_wave.py").write_text(TOKENIZATION)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config |= {
        "tokenizer_class": "WaveTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_wave.WaveTokenizer", None]},
    }
    file.write_text(json.dumps(config))


def answer(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return the greedy continuation, by the same formula written down once more."""
    import torch
    from safetensors.torch import load_file

    tensors, ids = load_file(folder / "model.safetensors"), list(prompt)
    for _ in range(count):
        hidden = tensors["embed.weight"][ids]
        steps = torch.arange(1, len(ids) + 1)[:, None]
        for layer in range(2):
            mean = hidden.cumsum(0) / steps
            turned = mean @ tensors[f"turns.{layer}.weight"].T + tensors[f"turns.{layer}.bias"]
            hidden = hidden + turned.sin()
        ids.append(int((tensors["head.weight"] @ hidden[-1]).argmax()))
    return ids[len(prompt) :]
