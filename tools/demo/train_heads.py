"""Train Medusa heads for the embedded model: ``python -m tools.demo.train_heads``, minutes.

The model stays as it is; each head learns to say what comes one token further, from the same hidden
state. A draft is right when it is what the model itself says, so heads learn that, not what the
documents say ("self-distillation", Cai and others 2024, arXiv 2401.10774, section 2.3.2): documents
are read once, and where the model's own choice is the document's next token, what it chooses behind
that is what it would say by itself. Heads are then trained on what has been kept of that reading.
They are of Medusa's first kind: blocks, and a head of their own, which begins as the model's
(section 2.2). It says the tokens that come most, as vLLM has it, which takes half the time and a
third of the space. torch and transformers are imported inside the functions, so that importing this
module is light.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgi_trio.demo import MODEL_ID, heads_path, model_path
from tools.demo.documents import Corpus
from tools.demo.markup import READ
from tools.demo.train import (
    IGNORED,
    TrainingBatch,
    TrainingProgress,
    add_run_flags,
    batches,
    multiplies_bfloat16,
)

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

HELDOUT_SEED = 1009  # of documents that heads are judged by
HELDOUT_SHARE = 0.05  # of as many examples as they learn from


@dataclass(frozen=True)
class HeadsRecipe:
    """The numbers of one training run."""

    heads: int = 4
    layers: int = 1  # blocks of a head
    tokens: int = 1024  # that a head can say
    seed: int = 11
    examples: int = 370_000
    steps: int = 3000
    batch_size: int = 512  # examples a step
    batch_tokens: int = 4096  # padded tokens of documents that are read at once
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    threads: int = 2


@dataclass(frozen=True)
class Examples:
    """What the model says behind its hidden states, after the final norm."""

    hidden: torch.Tensor  # float16 [n, features]
    choices: torch.Tensor  # int16 [n, heads]: two tokens further, three, ...; IGNORED: unknown


def load(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return the model, which learns nothing here, and its tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return model.requires_grad_(False).eval(), tokenizer


def read(
    model: LlamaForCausalLM, documents: Iterator[TrainingBatch], count: int, heads: int
) -> Examples:
    """Read documents until they have given `count` examples, or some more."""
    import torch

    hidden, choices, found = [], [], 0
    progress = TrainingProgress(count)
    while found < count:
        part = read_batch(model, next(documents), heads)
        hidden.append(part.hidden)
        choices.append(part.choices)
        found += len(part.hidden)
        progress.show(min(found, count))
    progress.finish()
    return Examples(torch.cat(hidden), torch.cat(choices))


def read_batch(model: LlamaForCausalLM, batch: TrainingBatch, heads: int) -> Examples:
    """Return the examples of a batch: of places whose next token is the model's own choice."""
    import torch

    with torch.no_grad():
        hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        said = (batch.targets != IGNORED) & (batch.weights >= READ)
        own = torch.full_like(batch.targets, IGNORED)
        own[said] = model.lm_head(hidden[said]).argmax(dim=-1)
    followed = said & (own == batch.targets)
    width = own.shape[1]
    choices = torch.full((*own.shape, heads), IGNORED)
    still = followed
    for i in range(min(heads, width - 1)):
        # Head i says what is chosen at t + i + 1, where all before it are the document's too.
        end = width - 1 - i
        choices[:, :end, i] = torch.where(still[:, :end], own[:, i + 1 :], IGNORED)
        still = still[:, :end] & followed[:, i + 1 :]
    kept = choices[:, :, 0] != IGNORED
    return Examples(hidden[kept].half(), choices[kept].short())


def most_frequent(examples: Examples, count: int) -> torch.Tensor:
    """Return the tokens that are chosen most, at most `count` of them, in order: int64."""

    chosen = examples.choices[examples.choices != IGNORED].long()
    ids, times = chosen.unique(return_counts=True)
    most: torch.Tensor = ids[times.argsort(descending=True, stable=True)[:count]]
    return most.sort().values


class Heads:
    """Blocks x + SiLU(Wx + b) and a head over some tokens, of each draft; they learn."""

    def __init__(self, model: LlamaForCausalLM, tokens: torch.Tensor, count: int, layers: int):
        """`tokens`: int64, what the rows of a head stand for."""
        from torch import nn

        hidden = model.config.hidden_size
        self.tokens = tokens
        self.blocks = [[nn.Linear(hidden, hidden) for _ in range(layers)] for _ in range(count)]
        own = model.lm_head.weight.detach()[tokens]
        self.heads = [nn.Parameter(own.clone()) for _ in range(count)]
        for block in (each for blocks in self.blocks for each in blocks):
            nn.init.normal_(block.weight, std=0.02)
            nn.init.zeros_(block.bias)

    def parameters(self) -> list[torch.Tensor]:
        blocks = (block for blocks in self.blocks for block in blocks)
        return [*self.heads, *(parameter for block in blocks for parameter in block.parameters())]

    def logits(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Return what each head says from hidden states [n, features]: [n, tokens]."""
        from torch.nn import functional

        found = []
        for blocks, head in zip(self.blocks, self.heads, strict=True):
            state = hidden
            for block in blocks:
                state = state + functional.silu(block(state))
            found.append(functional.linear(state, head))
        return found

    def places(self, choices: torch.Tensor) -> torch.Tensor:
        """Return which rows of a head stand for tokens, IGNORED for those that none stands for."""
        import torch

        tokens = choices.long().contiguous()
        rows = torch.searchsorted(self.tokens, tokens).clamp_max(len(self.tokens) - 1)
        return torch.where(self.tokens[rows] == tokens, rows, IGNORED)


def train(model: LlamaForCausalLM, examples: Examples, recipe: HeadsRecipe) -> Heads:
    """Return heads that have learnt from examples, all of them alike."""
    import torch
    from torch.nn import functional

    tokens = most_frequent(examples, recipe.tokens)
    heads = Heads(model, tokens, recipe.heads, recipe.layers)
    optimizer = torch.optim.AdamW(
        heads.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True
    )
    progress = TrainingProgress(recipe.steps)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe)
        some = torch.randint(0, len(examples.hidden), (recipe.batch_size,))
        hidden, targets = examples.hidden[some].float(), heads.places(examples.choices[some])
        with torch.autocast("cpu", torch.bfloat16, enabled=multiplies_bfloat16()):
            said = heads.logits(hidden)
        losses = [
            functional.cross_entropy(logits.float(), own, ignore_index=IGNORED, reduction="sum")
            for logits, own in zip(said, targets.unbind(1), strict=True)
        ]
        loss = torch.stack(losses).sum() / recipe.batch_size
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        progress.show(step + 1, loss.item())
    progress.finish()
    return heads


def _schedule(step: int, recipe: HeadsRecipe) -> float:
    """Rise linearly, then fall along a cosine to a hundredth."""
    rising = min(1.0, (step + 1) / recipe.warmup_steps)
    return rising * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / recipe.steps)))


def judge(heads: Heads, examples: Examples) -> list[float]:
    """Return how often each head is right together with all before it.

    1 and their sum are the tokens of a step.
    """
    import torch

    right = torch.ones(len(examples.hidden), dtype=torch.bool)
    shares = []
    with torch.no_grad():
        for i, logits in enumerate(heads.logits(examples.hidden.float())):
            right &= heads.tokens[logits.argmax(dim=-1)] == examples.choices[:, i]
            shares.append(right.float().mean().item())
    return shares


def run(
    recipe: HeadsRecipe, folder: Path, documents: Iterator[TrainingBatch] | None = None
) -> tuple[Heads, list[float]]:
    """Train heads for the model in `folder`; return them and what `judge` says of them.

    `documents`: batches to learn from and then to be judged by; None: the model's own corpus, and
    documents of another seed.
    """
    import torch

    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    model, tokenizer = load(folder)

    def source(seed: int) -> Iterator[TrainingBatch]:
        return documents or batches(Corpus(seed), tokenizer, recipe.batch_tokens, seed)

    heads = train(model, read(model, source(recipe.seed), recipe.examples, recipe.heads), recipe)
    judged = max(1, int(HELDOUT_SHARE * recipe.examples))
    return heads, judge(heads, read(model, source(HELDOUT_SEED), judged, recipe.heads))


def save(heads: Heads, output: Path, base: str) -> None:
    """Write heads as vLLM has them, in bfloat16."""
    import torch
    from safetensors.torch import save_file

    output.mkdir(parents=True, exist_ok=True)
    tensors = {"token_map": heads.tokens}
    for i, (blocks, head) in enumerate(zip(heads.blocks, heads.heads, strict=True)):
        tensors[f"lm_heads.{i}.weight"] = head.detach().to(torch.bfloat16)
        for j, block in enumerate(blocks):
            for name, parameter in block.named_parameters():
                tensors[f"blocks.{i}.layers.{j}.{name}"] = parameter.detach().to(torch.bfloat16)
    config = {
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": base,
        "hidden_size": heads.heads[0].shape[1],
        "model_type": "medusa",
        "num_heads": len(heads.heads),
        "num_hidden_layers": len(heads.blocks[0]),
        "truncated_vocab_size": len(heads.tokens),
    }
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    file = output / "model.safetensors"
    save_file(tensors, file)
    file.chmod(0o644)  # safetensors writes for its owner alone, but a package is for everybody


def main() -> None:
    """Train, save, and say how often each head is right."""
    parser = argparse.ArgumentParser(description="Train Medusa heads for the embedded model.")
    parser.add_argument("--model", type=Path, default=model_path(), help="folder of the model")
    parser.add_argument("--output", type=Path, default=heads_path(), help="folder to write")
    parser.add_argument("--heads", type=int, default=HeadsRecipe.heads, help="drafts a step")
    parser.add_argument("--layers", type=int, default=HeadsRecipe.layers, help="blocks of a head")
    parser.add_argument(
        "--examples", type=int, default=HeadsRecipe.examples, help="places to learn from"
    )
    parser.add_argument(
        "--tokens", type=int, default=HeadsRecipe.tokens, help="tokens that a head can say"
    )
    add_run_flags(parser, HeadsRecipe())
    args = parser.parse_args()
    begin = time.monotonic()
    recipe = HeadsRecipe(
        heads=args.heads,
        layers=args.layers,
        tokens=args.tokens,
        examples=args.examples,
        seed=args.seed,
        steps=args.steps,
        threads=args.threads,
        batch_tokens=args.batch_tokens,
    )
    heads, right = run(recipe, args.model)
    save(heads, args.output, MODEL_ID if args.model == model_path() else str(args.model))
    shares = ", ".join(f"{share:.2f}" for share in right)
    elapsed = time.monotonic() - begin
    gain = f"{1 + sum(right):.2f} tokens a step"
    print(f"right: {shares}, {gain}; {elapsed:.0f} s, saved to {args.output}")


if __name__ == "__main__":
    main()
