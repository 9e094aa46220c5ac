"""The linears of a decoder that an adapter changes, found by the names of the model's modules.

A *site* is a linear as it is computed: query, key and value together, gate and up together. So a
site may have several pairs, for matrices that the checkpoint stores separately, or one pair for all
of it, if the checkpoint has fused them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final, Literal

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.checks import check_head, check_plain, check_shapes
from tgi_trio.model.adapters.experts import WholePair, has_own_experts, place_experts
from tgi_trio.model.adapters.files import (
    Adapter,
    EmbeddingPair,
    Pair,
    ReplacedRows,
    SavedMatrix,
    TokenRows,
)
from tgi_trio.model.adapters.rows import (
    find_embedded_rows,
    find_embedding_pair,
    find_head_rows,
)
from tgi_trio.model.matrices.decoder import layer_refs, outer_refs
from tgi_trio.model.matrices.references import LinearRef, MatrixRef
from tgi_trio.model.matrices.roles import AttentionRefs, ExpertsRefs, MlpRefs
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.wrappers import text_name

Role = Literal[
    "qkv",
    "query up",
    "latent up",
    "output",
    "inner",
    "down",
    "shared inner",
    "shared down",
    "shared router",
    "expert inner",
    "expert down",
    "head",
]
_NAMED: Final = 8  # most modules listed in an error message
_WORDS: Final = {
    "experts": "experts",
    "gains": "magnitudes (DoRA) or biases",
    "head": "the head",
    "lookups": "the embedding",
    "latents": "what expands latents",
    "tokens": "embeddings of tokens",
}


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A linear of a layer, or the head."""

    layer: int  # of the head: the number of layers
    role: Role
    expert: int = 0  # its number, for the linears of one

    @property
    def of_expert(self) -> bool:
        """Whether only tokens that are routed to an expert read it."""
        return self.role.startswith("expert")


@dataclass(frozen=True, slots=True)
class AdapterScope:
    """What the adapters of a server may change beside linears of layers, for which it has room."""

    experts: bool = True
    head: bool = True
    gains: bool = True  # with DoRA and biases
    tokens: bool = True  # some rows of the embedding
    lookups: bool = True  # all of the embedding, by A and B
    latents: bool = True  # what expands them

    @classmethod
    def of(cls, words: Collection[str]) -> AdapterScope:
        """Return the scope that has these fields."""
        return cls(**{each.name: each.name in words for each in fields(cls)})

    def words(self) -> tuple[str, ...]:
        """Return the fields that it has."""
        return tuple(each.name for each in fields(self) if getattr(self, each.name))


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A site that an adapter changes, with the pair of each of the linear's pieces."""

    linear: LinearRef
    pairs: tuple[Pair | None, ...]  # one for each piece; None: it is unchanged
    rows: ReplacedRows | None = None  # of a head: some of its rows, to which the pair is added

    @property
    def replaces_bias(self) -> bool:
        """Whether a head has another bias, or none; see `TokenRows`."""
        if isinstance(self.rows, SavedMatrix):
            return self.rows.bias is not None
        return self.rows is not None and bool(self.linear.pieces[0].matrix.bias)

    @property
    def rank(self) -> int:
        """The largest rank of a piece; each row that is replaced is one more, if it is known."""
        rank = max((pair.rank for pair in self.pairs if pair is not None), default=0)
        return rank + (len(self.rows.tokens) if isinstance(self.rows, TokenRows) else 0)


EVERYTHING: Final = AdapterScope()
NOTHING: Final = AdapterScope.of(())


def adaptable_linears(
    spec: DecoderSpec, scope: AdapterScope = EVERYTHING
) -> Iterator[tuple[Site, LinearRef]]:
    """Yield the linears of a decoder that adapters may change, in the order of computation.

    But the first linears of all experts come before all second ones. Excluded are linears of
    routers, of mixers, of blocks shared by layers, of layers with cross-attention to images, and of
    attention to one key per token; experts stored as one matrix, or added after the next layer's
    MLP; and a head that is more than a linear of the hidden states.
    """
    for site, linear in _list_linears(spec):
        beyond = site.of_expert and not scope.experts
        beyond |= site.role == "head" and not scope.head
        beyond |= site.role == "latent up" and not scope.latents
        if not beyond:
            yield site, linear


@lru_cache(maxsize=1)  # a model may have ten thousand, and every adapter is mapped to all of them
def _list_linears(spec: DecoderSpec) -> Sequence[tuple[Site, LinearRef]]:
    """Return all linears of `adaptable_linears`."""
    found: list[tuple[Site, LinearRef]] = []
    for index in range(len(spec.layers)):
        found += _linears_of_layer(spec, index)
    if adapts_head(spec):
        found.append((head_site(spec), outer_refs(spec).head))
    return found


def _linears_of_layer(spec: DecoderSpec, index: int) -> Iterator[tuple[Site, LinearRef]]:
    refs = layer_refs(spec, index)
    if refs.shared is not None or refs.cross_attention is not None:
        return
    attention = refs.attention
    if attention is not None and attention.shared_key is None:
        yield Site(index, "qkv"), attention.qkv
        if (query_up := find_query_up(attention)) is not None:
            yield Site(index, "query up"), query_up
        if attention.latent is not None:
            yield Site(index, "latent up"), attention.latent.up
        yield Site(index, "output"), attention.output
    if isinstance(refs.mlp, MlpRefs):
        yield Site(index, "inner"), refs.mlp.inner
        yield Site(index, "down"), refs.mlp.down
    if isinstance(refs.mlp, ExpertsRefs) and refs.mlp.shared is not None:
        if refs.mlp.shared_router is not None:
            yield Site(index, "shared router"), refs.mlp.shared_router
        yield Site(index, "shared inner"), refs.mlp.shared.inner
        yield Site(index, "shared down"), refs.mlp.shared.down
    mixture = refs.mlp if refs.beside is None else refs.beside.experts
    if isinstance(mixture, ExpertsRefs) and has_own_experts(spec.layers[index]):
        for i, expert in enumerate(mixture.experts):
            yield Site(index, "expert inner", i), expert.inner
        for i, expert in enumerate(mixture.experts):
            yield Site(index, "expert down", i), expert.down


def find_query_up(attention: AttentionRefs) -> LinearRef | None:
    """Return the linear that expands compressed queries, if adapters may change it.

    They may not where one matrix has queries and gates by turns (`LatentSpec.doubled`).
    """
    latent = attention.latent
    return None if latent is None or latent.gate_up is not None else latent.query_up


def adapts_head(spec: DecoderSpec) -> bool:
    """Return whether a decoder's head is a single linear of the hidden states."""
    return not (spec.normalised_head or spec.added_tokens or spec.embedding_width)


def head_site(spec: DecoderSpec) -> Site:
    return Site(len(spec.layers), "head")


def find_input_scale(spec: DecoderSpec, site: Site) -> float:
    """Return the factor of a linear's input that is left to what follows the linear."""
    if site.role == "head":
        return spec.head_input_scale
    return spec.attention_input_scale if site.role in ("qkv", "output") else 1.0


def find_module(spec: DecoderSpec, site: Site, matrix: MatrixRef) -> str:
    """Return the module that a site's matrix belongs to; a tied head has the embedding's matrix."""
    return spec.names.head if site.role == "head" else matrix.name.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Changes:
    """What an adapter changes of a decoder."""

    linears: Mapping[Site, AdaptedLinear]
    embedded: ReplacedRows | None  # rows of the embedding
    looked_up: EmbeddingPair | None  # what is added to all of them

    @property
    def rank(self) -> int:
        """The largest rank; each row that is replaced counts as one, if it is known."""
        ranks = [linear.rank for linear in self.linears.values()]
        ranks += [len(self.embedded.tokens)] if isinstance(self.embedded, TokenRows) else []
        ranks += [] if self.looked_up is None else [self.looked_up.rank]
        return max(ranks, default=1)

    @property
    def compares(self) -> bool:
        """Whether what is replaced is found by comparing matrices with the model's."""
        return any(isinstance(each, SavedMatrix) for each in self._rows)

    @property
    def _rows(self) -> Sequence[ReplacedRows | None]:
        return [self.embedded, *(linear.rows for linear in self.linears.values())]

    @property
    def scope(self) -> AdapterScope:
        """The scope that they need."""
        pairs = [pair for linear in self.linears.values() for pair in linear.pairs]
        gains = any(pair.vectors for pair in pairs if pair is not None)
        gains |= any(linear.replaces_bias for linear in self.linears.values())
        gains |= self.looked_up is not None and self.looked_up.magnitude is not None
        return AdapterScope(
            experts=any(site.of_expert for site in self.linears),
            head=any(site.role == "head" for site in self.linears),
            gains=gains,
            tokens=self.embedded is not None,
            lookups=self.looked_up is not None,
            latents=any(site.role == "latent up" for site in self.linears),
        )


def map_adapter(
    adapter: Adapter,
    spec: DecoderSpec,
    max_rank: int | None = None,
    scope: AdapterScope = EVERYTHING,
) -> Changes:
    """Return an adapter's changes of a decoder.

    Raises ModelLoadError for modules that cannot be adapted here (all are named), for matrices of
    another shape, for a rank above `max_rank`, and for what is beyond `scope`.
    """
    named = {text_name(module): pair for module, pair in adapter.pairs.items()}
    left = {*adapter.pairs, *adapter.experts, *adapter.replaced_rows, *adapter.embeddings}
    whole = place_experts(adapter, spec) if adapter.experts else {}
    left.difference_update(each.pair.module for each in whole.values())
    found: dict[Site, AdaptedLinear] = {}
    for site, linear in adaptable_linears(spec):
        pairs: list[Pair | None] = []
        for piece in linear.pieces:
            module = find_module(spec, site, piece.matrix)
            bare = module.removeprefix(spec.names.base)  # name in an adapter of the bare model
            pair = named.get(module) or named.get(bare)
            pairs.append(pair)
            if pair is not None:
                check_shapes(adapter, pair, piece.matrix, of_head=site.role == "head")
                left.discard(pair.module)
        if site.of_expert:
            pairs = _pair_expert(adapter, site, linear, pairs, whole)
        if site.role == "latent up":
            check_plain(adapter, pairs, "what expands latents")
        rows = find_head_rows(adapter, spec) if site.role == "head" else None
        if rows is not None:
            left.discard(rows.module)
            check_head(adapter, pairs, rows, linear)
        if rows is not None or any(pairs):
            found[site] = AdaptedLinear(linear, tuple(pairs), rows)
    embedded = find_embedded_rows(adapter, spec)
    if embedded is not None:
        head = found.get(head_site(spec))
        with_head = head is not None and head.rows is not None
        tied = spec.tied_head and isinstance(embedded, TokenRows)
        move = left.add if tied and not with_head else left.discard
        move(embedded.module)
    looked_up = find_embedding_pair(adapter, spec)
    if looked_up is not None:
        left.discard(looked_up.module)
    if left:
        raise ModelLoadError(_refuse_modules(adapter, sorted(left), spec))
    changes = Changes(found, embedded, looked_up)
    if spec.tied_head and adapter.config.values.get("ensure_weight_tying"):
        _check_tied(adapter, changes, spec)
    _check_limits(adapter, changes, max_rank, scope)
    return changes


def _check_tied(adapter: Adapter, changes: Changes, spec: DecoderSpec) -> None:
    """Raise ModelLoadError unless an adapter that is to leave a head tied says what both become."""
    head = changes.linears.get(head_site(spec))
    embedded = changes.embedded is not None or changes.looked_up is not None
    if embedded != (head is not None):
        raise ModelLoadError(
            f"{adapter.folder} has `ensure_weight_tying`, and tensors of the "
            f"{'embedding' if embedded else 'head'} alone, not of what is tied to it: both are "
            f"needed here. {adapter.config.advise()}"
        )


def _check_limits(
    adapter: Adapter, changes: Changes, max_rank: int | None, scope: AdapterScope
) -> None:
    """Raise ModelLoadError for a rank above `max_rank`, and for what is beyond `scope`."""
    if max_rank is not None and changes.rank > max_rank:
        replaced = [each for each in adapter.replaced_rows.values() if isinstance(each, TokenRows)]
        of_tokens = any(len(each.tokens) == changes.rank for each in replaced)
        what = f"rows of {changes.rank} tokens" if of_tokens else f"the rank {changes.rank}"
        raise ModelLoadError(
            f"{adapter.folder} has {what}; at most {max_rank} is served (--max-lora-rank)"
        )
    if beyond := set(changes.scope.words()) - set(scope.words()):
        raise ModelLoadError(
            f"{adapter.folder} changes {' and '.join(_WORDS[each] for each in sorted(beyond))}, "
            "and this server has set memory aside for adapters of linears alone: name an adapter "
            "that does so at its start (--lora-adapters), and it is set aside for all"
        )


def _pair_expert(
    adapter: Adapter,
    site: Site,
    linear: LinearRef,
    pairs: list[Pair | None],
    whole: Mapping[tuple[int, str], WholePair],
) -> list[Pair | None]:
    """Return the pairs of an expert's linear, of its own or those of all experts."""
    of_all = whole.get((site.layer, site.role.removeprefix("expert ")))
    own = [pair for pair in pairs if pair is not None]
    if own and of_all is not None:
        raise ModelLoadError(
            f"{adapter.folder} has changes of {own[0].module} and of all experts together, "
            f"{of_all.pair.module}"
        )
    check_plain(adapter, own, "experts")
    return pairs if of_all is None else [*of_all.of_expert(site.expert, linear)]


def _refuse_modules(adapter: Adapter, modules: list[str], spec: DecoderSpec) -> str:
    names = {
        find_module(spec, site, piece.matrix)
        for site, linear in adaptable_linears(spec)
        for piece in linear.pieces
    }
    kinds = sorted({name.rpartition(".")[2] for name in names})
    more = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
    outer = " (nor is this head)" if spec.names.head in modules else ""
    return (
        f"{adapter.folder} changes {', '.join(modules[:_NAMED])}{more}, which is not adapted "
        f"here{outer}: of {spec.family} models {', '.join(kinds) or 'nothing'} can be. "
        f"{adapter.config.advise()}"
    )
