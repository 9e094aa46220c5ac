"""The operations of experts beside an MLP (Gemma 4)."""

from __future__ import annotations

from tgi_trio.model.matrices.references import LinearRef, NormRef
from tgi_trio.model.matrices.roles import BesideRefs
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec
from tgi_trio.shard.cpu_backend.operations.adapted_sites import SiteRecorder
from tgi_trio.shard.cpu_backend.operations.mixtures import Branch, MixtureWriter
from tgi_trio.shard.cpu_backend.operations.norms import NormWriter
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import Buffer


def add_beside(
    writer: OperationWriter,
    norms: NormWriter,
    spec: DecoderSpec,
    down: LinearRef,
    refs: BesideRefs,
    experts: ExpertsSpec,
    post_norm: NormRef,
    sites: SiteRecorder,
) -> None:
    """End an MLP with experts beside it: the sum of both joins the residual stream.

    `sites`: where adapters may change the experts. Raises ModelLoadError as the weights do.
    """
    writer.linear(down, Buffer.INNER, Buffer.DENSE)
    branch = Branch(Buffer.BRANCH, 1.0, spec.activation, spec.hidden_size)
    mixture = MixtureWriter(writer, refs.experts, experts, branch, refs.expert_scale, sites=sites)
    norms.add(refs.router_norm, Buffer.HIDDEN)
    mixture.route(len(writer.rows) - 1, scale=spec.hidden_size**-0.5)
    norms.add(refs.norm, Buffer.HIDDEN)
    mixture.mix(len(writer.rows) - 1)
    norms.add_in_place(refs.dense_post_norm, Buffer.DENSE, spec.hidden_size)
    norms.join(refs.post_norm, 1.0, target=Buffer.DENSE)
    norms.join(post_norm, spec.residual_scale * spec.mlp_scale, source=Buffer.DENSE)
