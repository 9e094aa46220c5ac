"""Train the embedded model: ``python -m tools.demo.train --output DIR``.

Everything follows from the seed: documents, tokenizer, initial weights and the order of batches.
torch and transformers are imported inside the functions, so that importing this module is light.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tgi_trio.demo import model_path
from tools.demo.attention import attention_loss
from tools.demo.documents import Corpus
from tools.demo.markup import ASSISTANT, END, END_OF_TEXT, SYSTEM, USER, Document
from tools.demo.train_tokenizer import add_marks, train_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT_LENGTH = 1024  # tokens
VOCABULARY = 2048  # tokens, beside which there are the marks
TOKENIZER_DOCUMENTS = 6000  # documents the tokenizer is trained on
POOL_DOCUMENTS = 1024  # documents drawn at once and sorted by length, to pad little
IGNORED = -100  # target of a padding position


@dataclass(frozen=True)
class Recipe:
    """The numbers of one training run."""

    seed: int = 7
    steps: int = 1200
    batch_tokens: int = 4096  # padded tokens in a batch
    learning_rate: float = 3e-3
    warmup_steps: int = 60
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    threads: int = 2
    attention: float = 0.0  # how much it counts where heads look that are to copy
    copying: float = 0.0  # share of documents that are lists, said again and again


@dataclass(frozen=True)
class TrainingBatch:
    """Padded rows: ``ids`` and ``targets`` int64, ``weights`` float32, all ``[rows, width]``."""

    ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor


def build_model(vocabulary: int, seed: int) -> LlamaForCausalLM:
    """Return a fresh float32 model; head_dim 32 and widths of a multiple of 32 suit CPU kernels."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, document: Document) -> tuple[list[int], list[float]]:
    """Return a document's token ids, at most CONTEXT_LENGTH of them, and their loss weights."""
    ids: list[int] = []
    weights: list[float] = []
    for piece in document:
        piece_ids = tokenizer.encode(piece.text, add_special_tokens=False)
        ids += piece_ids
        weights += [piece.weight] * len(piece_ids)
    return ids[:CONTEXT_LENGTH], weights[:CONTEXT_LENGTH]


def batches(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, batch_tokens: int, seed: int
) -> Iterator[TrainingBatch]:
    """Yield batches without end; rows of similar length share a batch."""
    rng = random.Random(seed)
    while True:
        rows = [encode(tokenizer, document) for document in corpus.documents(POOL_DOCUMENTS)]
        rows.sort(key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], list[float]]]] = [[]]
        for row in rows:
            if groups[-1] and (len(groups[-1]) + 1) * len(row[0]) > batch_tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from (_pad(group, tokenizer.pad_token_id) for group in groups)


def _pad(rows: list[tuple[list[int], list[float]]], pad_id: int) -> TrainingBatch:
    import torch

    width = max(len(ids) for ids, _ in rows) - 1
    ids = torch.full((len(rows), width), pad_id)
    targets = torch.full((len(rows), width), IGNORED)
    weights = torch.zeros((len(rows), width))
    for row, (row_ids, row_weights) in enumerate(rows):
        length = len(row_ids) - 1
        ids[row, :length] = torch.tensor(row_ids[:-1])
        targets[row, :length] = torch.tensor(row_ids[1:])
        weights[row, :length] = torch.tensor(row_weights[1:])
    return TrainingBatch(ids, targets, weights)


def weighted_loss(
    model: LlamaForCausalLM, batch: TrainingBatch, attention: float = 0.0
) -> torch.Tensor:
    """Return the weighted mean cross entropy in nats; padding is to the right, so causal.

    `attention`: how much what the heads look at counts beside it (`attention_loss`).
    """
    import torch.nn.functional as functional

    output = model.model(
        input_ids=batch.ids, use_cache=False, output_attentions=attention > 0, return_dict=True
    )
    hidden = output.last_hidden_state
    kept = batch.targets != IGNORED
    logits = model.lm_head(hidden[kept]).float()
    losses = functional.cross_entropy(logits, batch.targets[kept], reduction="none")
    weights = batch.weights[kept]
    loss: torch.Tensor = (losses * weights).sum() / weights.sum()
    if attention > 0:
        loss = loss + attention * attention_loss(
            output.attentions, batch.ids, batch.targets, IGNORED
        )
    return loss


def start(recipe: Recipe, resume: Path | None) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return a fresh model and tokenizer, or those of a folder to go on from."""
    if resume is None:
        sample = Corpus(recipe.seed).documents(TOKENIZER_DOCUMENTS)
        texts = (piece.text for document in sample for piece in document)
        tokenizer = train_tokenizer(texts, VOCABULARY, CONTEXT_LENGTH)
        return build_model(len(tokenizer), recipe.seed), tokenizer
    from transformers import AutoTokenizer, LlamaForCausalLM

    loaded: Any = AutoTokenizer.from_pretrained(resume)
    add_marks(loaded)
    model: Any = LlamaForCausalLM.from_pretrained(resume)
    if len(loaded) > model.config.vocab_size:
        model.resize_token_embeddings(len(loaded))  # new rows are like the mean of the old
    return model, loaded


def train(
    recipe: Recipe, resume: Path | None = None
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, float]:
    """Train tokenizer and model; return them and the mean loss of the last fifty steps."""
    import torch

    torch.set_num_threads(recipe.threads)
    model, tokenizer = start(recipe, resume)
    if recipe.attention:
        model.set_attn_implementation("eager")  # the only one that tells where heads look
    optimizer = _optimizer(model, recipe)
    source = batches(
        Corpus(recipe.seed, recipe.copying), tokenizer, recipe.batch_tokens, recipe.seed
    )
    fast_bfloat16 = multiplies_bfloat16()
    progress = TrainingProgress(recipe.steps)
    model.train()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _schedule(step, recipe)
        with torch.autocast("cpu", torch.bfloat16, enabled=fast_bfloat16):
            loss = weighted_loss(model, next(source), recipe.attention)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        progress.show(step + 1, loss.item())
    return model.eval(), tokenizer, progress.finish()


def multiplies_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16, which takes a third of the time."""
    import torch

    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.Optimizer:
    import torch

    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)


def _schedule(step: int, recipe: Recipe) -> float:
    """Rise linearly, then fall along a cosine to one hundredth."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


class TrainingProgress:
    """A bar on the terminal, or a line now and then where there is none."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._losses: list[float] = []
        self._start = time.monotonic()

    def show(self, step: int, loss: float | None = None) -> None:
        """Note one step's loss, where there is one, and redraw."""
        if loss is not None:
            self._losses = [*self._losses[-49:], loss]
        terminal = sys.stderr.isatty()
        if not terminal and step % 50 and step != self._steps:
            return
        elapsed = time.monotonic() - self._start
        left = elapsed / step * (self._steps - step)
        filled = 30 * step // self._steps
        bar = "#" * filled + "." * (30 - filled)
        mean = f"loss {self.mean():.3f} " if self._losses else ""
        line = f"[{bar}] {step}/{self._steps} {mean}{elapsed:.0f}s +{left:.0f}s"
        print(line, end="\r" if terminal else "\n", file=sys.stderr, flush=True)

    def mean(self) -> float:
        """Return the mean loss of the last fifty steps, NaN without any."""
        return sum(self._losses) / len(self._losses) if self._losses else math.nan

    def finish(self) -> float:
        """End the bar's line and return the mean loss."""
        if sys.stderr.isatty():
            print(file=sys.stderr)
        return self.mean()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model folder: bfloat16 tensors, to be computed in the config's float32."""
    import torch
    from transformers import GenerationConfig

    ends: Any = tokenizer.convert_tokens_to_ids([END, END_OF_TEXT])
    model.config.bos_token_id = tokenizer.bos_token_id
    model.config.eos_token_id = ends
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    halved: Any = model.bfloat16()
    halved.save_pretrained(output)
    # Saving a bfloat16 model writes that dtype; the router and the shard compute in this one.
    model.config.dtype = torch.float32
    model.config.save_pretrained(output)
    tokenizer.save_pretrained(output, save_jinja_files=False)
    _write_for_older_readers(output)


def _write_for_older_readers(output: Path) -> None:
    """Name the tokenizer's class and special tokens as every release of transformers knows them."""
    path = output / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("backend", "extra_special_tokens", "is_local", "local_files_only"):
        config.pop(key, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = [SYSTEM, USER, ASSISTANT]
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    # safetensors writes a file that only its owner may read, but a package is for everybody.
    (output / "model.safetensors").chmod(0o644)


class Run(Protocol):
    """What a training run is told, of a model or of its heads."""

    @property
    def seed(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def batch_tokens(self) -> int: ...
    @property
    def threads(self) -> int: ...


def add_run_flags(parser: argparse.ArgumentParser, default: Run) -> None:
    """Add the flags that every training run has."""
    add = parser.add_argument
    add("--steps", type=int, default=default.steps, help="optimizer steps")
    add("--seed", type=int, default=default.seed, help="seed of everything")
    add("--threads", type=int, default=default.threads, help="CPU threads")
    add("--batch-tokens", type=int, default=default.batch_tokens, help="padded tokens in a batch")


def main() -> None:
    """Train, save, and say what came out."""
    parser = argparse.ArgumentParser(description="Train the embedded model of tgi-trio.")
    parser.add_argument("--output", type=Path, default=model_path(), help="folder to write")
    add_run_flags(parser, Recipe())
    parser.add_argument("--resume", type=Path, help="folder of a model to go on from")
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=Recipe.learning_rate,
        help="highest learning rate; a third of the default suits --resume",
    )
    parser.add_argument(
        "--attention",
        type=float,
        default=Recipe.attention,
        help="how much it counts where those heads look that are to copy",
    )
    parser.add_argument(
        "--copying",
        type=float,
        default=Recipe.copying,
        help="share of documents that teach to copy, before all others are learnt",
    )
    args = parser.parse_args()
    begin = time.monotonic()
    recipe = Recipe(
        seed=args.seed,
        steps=args.steps,
        threads=args.threads,
        learning_rate=args.learning_rate,
        attention=args.attention,
        copying=args.copying,
        batch_tokens=args.batch_tokens,
    )
    model, tokenizer, loss = train(recipe, args.resume)
    parameters = sum(p.numel() for p in model.parameters())
    save(model, tokenizer, args.output)
    elapsed = time.monotonic() - begin
    print(f"{parameters} parameters, loss {loss:.4f}, {elapsed:.0f} s, saved to {args.output}")


if __name__ == "__main__":
    main()
