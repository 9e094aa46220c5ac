"""Train Medusa heads for the embedded model: ``python -m tools.demo.train_heads``, minutes.

The model stays as it is; each head learns to say what comes one token further, from the same hidden
state, on the documents that the model was trained on. Heads are of Medusa's second kind: a block of
their own before the model's head (Cai and others 2024, arXiv 2401.10774, section 2.2). torch and
transformers are imported inside the functions, so that importing this module is light.
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
from tools.demo.train import IGNORED, TrainingBatch, TrainingProgress, batches

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

HELDOUT_SEED = 1009  # of documents that heads are judged by
HELDOUT_BATCHES = 8


@dataclass(frozen=True)
class HeadsRecipe:
    """The numbers of one training run."""

    heads: int = 3
    seed: int = 11
    steps: int = 400
    batch_tokens: int = 4096  # padded tokens in a batch
    learning_rate: float = 1e-2
    decay: float = 0.8  # what each head counts, of what the one before does
    threads: int = 2


def load(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return the model, which learns nothing here, and its tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return model.requires_grad_(False).eval(), tokenizer


def new_heads(count: int, hidden: int) -> nn.ModuleList:
    """Return blocks that change nothing yet: x + SiLU(Wx + b) with W and b zero."""
    from torch import nn

    heads = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(count))
    for parameter in heads.parameters():
        nn.init.zeros_(parameter)
    return heads


def head_losses(
    model: LlamaForCausalLM, heads: nn.ModuleList, batch: TrainingBatch
) -> tuple[list[torch.Tensor], list[float]]:
    """Return each head's weighted mean cross entropy in nats, and how often its best was right."""
    import torch
    from torch.nn import functional

    with torch.no_grad():
        hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    losses, right = [], []
    for i, head in enumerate(heads):
        # The model itself says targets[t] from hidden[t]; head i says what comes i + 1 later.
        targets, weights = batch.targets[:, 1 + i :], batch.weights[:, 1 + i :]
        own = hidden[:, : targets.shape[1]]
        kept = (targets != IGNORED) & (weights > 0)
        if not kept.any():
            continue
        state = own[kept]
        logits = model.lm_head(state + functional.silu(head(state))).float()
        each = functional.cross_entropy(logits, targets[kept], reduction="none")
        losses.append((each * weights[kept]).sum() / weights[kept].sum())
        right.append((logits.argmax(dim=-1) == targets[kept]).float().mean().item())
    return losses, right


def train(
    recipe: HeadsRecipe, folder: Path, documents: Iterator[TrainingBatch] | None = None
) -> tuple[nn.ModuleList, list[float]]:
    """Train heads for the model in `folder`; return them and how often each is right.

    `documents`: batches to learn from and then to be judged by; None: the model's own corpus, and
    documents of another seed.
    """
    import torch

    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    model, tokenizer = load(folder)
    heads = new_heads(recipe.heads, model.config.hidden_size)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    source = documents or batches(Corpus(recipe.seed), tokenizer, recipe.batch_tokens, recipe.seed)
    progress = TrainingProgress(recipe.steps)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe.steps)
        losses, _ = head_losses(model, heads, next(source))
        loss = sum(recipe.decay**i * each for i, each in enumerate(losses))
        if not isinstance(loss, torch.Tensor):
            continue  # documents of a few tokens
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress.show(step + 1, loss.item())
    progress.finish()
    held = documents or batches(Corpus(HELDOUT_SEED), tokenizer, recipe.batch_tokens, HELDOUT_SEED)
    with torch.no_grad():
        found = [head_losses(model, heads, next(held))[1] for _ in range(HELDOUT_BATCHES)]
    whole = [right for right in found if len(right) == recipe.heads]
    return heads, [sum(column) / len(column) for column in zip(*whole, strict=True)]


def _schedule(step: int, steps: int) -> float:
    """Fall along a cosine to a hundredth."""
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps))


def save(heads: nn.ModuleList, output: Path, base: str) -> None:
    """Write heads as TGI and Medusa's authors have them, in bfloat16."""
    import torch
    from safetensors.torch import save_file

    output.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{i}.0.linear.{name}": parameter.detach().to(torch.bfloat16).contiguous()
        for i, head in enumerate(heads)
        for name, parameter in head.named_parameters()
    }
    config = {
        "base_model_name_or_path": base,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": 1,
    }
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    file = output / "medusa_lm_head.safetensors"
    save_file(tensors, file)
    file.chmod(0o644)  # safetensors writes for its owner alone, but a package is for everybody


def main() -> None:
    """Train, save, and say how often each head is right."""
    parser = argparse.ArgumentParser(description="Train Medusa heads for the embedded model.")
    parser.add_argument("--model", type=Path, default=model_path(), help="folder of the model")
    parser.add_argument("--output", type=Path, default=heads_path(), help="folder to write")
    parser.add_argument("--heads", type=int, default=HeadsRecipe.heads, help="guesses a step")
    parser.add_argument("--steps", type=int, default=HeadsRecipe.steps, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=HeadsRecipe.seed, help="seed of everything")
    parser.add_argument("--threads", type=int, default=HeadsRecipe.threads, help="CPU threads")
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=HeadsRecipe.batch_tokens,
        help="padded tokens in a batch",
    )
    args = parser.parse_args()
    begin = time.monotonic()
    recipe = HeadsRecipe(
        heads=args.heads,
        seed=args.seed,
        steps=args.steps,
        threads=args.threads,
        batch_tokens=args.batch_tokens,
    )
    heads, right = train(recipe, args.model)
    save(heads, args.output, MODEL_ID if args.model == model_path() else str(args.model))
    shares = ", ".join(f"{share:.2f}" for share in right)
    elapsed = time.monotonic() - begin
    print(f"right: {shares}; {elapsed:.0f} s, saved to {args.output}")


if __name__ == "__main__":
    main()
