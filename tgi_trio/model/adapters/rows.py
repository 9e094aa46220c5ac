"""What an adapter changes of an embedding, and rows of a head that replace the model's."""

from __future__ import annotations

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.files import (
    Adapter,
    EmbeddingPair,
    ReplacedRows,
    SavedMatrix,
    TokenRows,
)
from tgi_trio.model.adapters.own_tokens import list_own_tokens
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.wrappers import text_name

_SHOWN = 3  # most tokens in an error


def find_embedding_pair(adapter: Adapter, spec: DecoderSpec) -> EmbeddingPair | None:
    """Return A and B of the embedding, if these can be added; raises ModelLoadError for misfits."""
    if _is_more(spec):
        return None
    module = spec.names.embedding
    named = {text_name(name): pair for name, pair in adapter.embeddings.items()}
    pair = named.get(module) or named.get(module.removeprefix(spec.names.base))
    if pair is None:
        return None
    tokens, width, rank = spec.vocab_size, spec.hidden_size, pair.rank
    if len(pair.a.shape) == 2:
        tokens = count_tokens(adapter, pair.names[0], pair.a.shape[1], tokens)
    magnitudes = () if pair.magnitude is None else (pair.magnitude,)
    if magnitudes and tokens != spec.vocab_size:
        raise ModelLoadError(
            f"{pair.names[0]} of {adapter.folder} has {tokens} tokens, and the model "
            f"{spec.vocab_size}: DoRA of an embedding is served with as many as the model has, "
            f"since its magnitudes are of all of them. {adapter.config.advise()}"
        )
    for name, shape, wanted in (
        (pair.names[0], pair.a.shape, (rank, tokens)),
        (pair.names[1], pair.b.shape, (width, rank)),
        *((name, each.shape, (width,)) for name, each in magnitudes),
        *((name, copy.shape, (tokens, width)) for name, copy in pair.copies),
    ):
        if tuple(shape) != wanted:
            raise ModelLoadError(
                f"{name} of {adapter.folder} is {list(shape)}; the model has {spec.vocab_size} "
                f"tokens of {width} numbers: the adapter is made for another base"
            )
    return pair


def find_embedded_rows(adapter: Adapter, spec: DecoderSpec) -> ReplacedRows | None:
    """Return the rows of the embedding that an adapter has, if they can be replaced.

    Raises ModelLoadError for misfits.
    """
    return None if _is_more(spec) else _find_rows(adapter, spec, spec.names.embedding)


def find_head_rows(adapter: Adapter, spec: DecoderSpec) -> ReplacedRows | None:
    """Return the rows of the head that an adapter has, which may be those of the embedding.

    Rows of a tied head that it names apart are the head's alone. Raises ModelLoadError for misfits.
    """
    rows = _find_rows(adapter, spec, spec.names.head)
    if spec.tied_head and rows is None:
        shared = _find_rows(adapter, spec, spec.names.embedding)
        return shared if isinstance(shared, TokenRows) else None  # saved whole, it is no head
    return rows


def explain_many_rows(adapter: Adapter, saved: SavedMatrix, most: int) -> str:
    """Return the error for a matrix that is saved whole and differs in more rows than `most`."""
    return (
        f"{saved.name} of {adapter.folder} differs from the model's in more than {most} rows; at "
        f"most as many are served beside others (--max-lora-rank). {adapter.config.advise()}"
    )


def count_tokens(adapter: Adapter, name: str, found: int, vocabulary: int) -> int:
    """Return the tokens that an adapter's tensor `name` may have: `found`, if these are served.

    A vocabulary may have been cut: what it lacks stays the model's. It may have been made larger by
    tokens that no text has: what it has for these is left out. Raises ModelLoadError for others.
    """
    if 0 < found <= vocabulary:
        return found
    own = list_own_tokens(adapter.folder, vocabulary) if found else None
    if not found or own == []:
        return found or vocabulary
    shown = ", ".join(f"`{token:.40}`" for token in (own or ())[:_SHOWN])
    which = f" ({shown}{', ...' if own and len(own) > _SHOWN else ''})" if own else ""
    raise ModelLoadError(
        f"{name} of {adapter.folder} has {found} tokens, and the model {vocabulary}: tokens that "
        f"an adapter adds{which} are not served beside others. {adapter.config.advise()}"
    )


def _is_more(spec: DecoderSpec) -> bool:
    """Return whether an embedding is more than a table of rows as wide as hidden states."""
    return bool(spec.embedding_width or spec.added_tokens or spec.normalised_embedding)


def _find_rows(adapter: Adapter, spec: DecoderSpec, module: str) -> ReplacedRows | None:
    bare = module.removeprefix(spec.names.base)
    named = {text_name(name): rows for name, rows in adapter.replaced_rows.items()}
    rows = named.get(module) or named.get(bare)
    if rows is None:
        return None
    if isinstance(rows, SavedMatrix):
        _check_saved(adapter, spec, rows)
    elif rows.rows.shape[1] != spec.hidden_size or max(rows.tokens) >= spec.vocab_size:
        raise ModelLoadError(
            f"{rows.name} of {adapter.folder} is {list(rows.rows.shape)}, for tokens up to "
            f"{max(rows.tokens)}; the model has {spec.vocab_size} tokens of {spec.hidden_size} "
            "numbers: the adapter is made for another base"
        )
    return rows


def _check_saved(adapter: Adapter, spec: DecoderSpec, saved: SavedMatrix) -> None:
    """Raise ModelLoadError unless a matrix has the model's width, and tokens that are served."""
    found, wanted = tuple(saved.matrix.shape), (spec.vocab_size, spec.hidden_size)
    same_width = len(found) == 2 and found[1] == wanted[1]
    if same_width and found[0] == count_tokens(adapter, saved.name, found[0], wanted[0]):
        return
    raise ModelLoadError(
        f"{saved.name} of {adapter.folder} is {list(found)}; the model has {wanted[0]} tokens of "
        f"{wanted[1]} numbers: the adapter is made for another base"
    )
