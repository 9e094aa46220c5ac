"""The operations of a mixture of experts: routing, then the experts' linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tgi_trio.model.matrices.references import LinearRef, VectorRef, every_unit
from tgi_trio.model.matrices.roles import ExpertsRefs, MlpRefs
from tgi_trio.model.specs.decoder import ExpertsSpec
from tgi_trio.shard.checkpoint.lookup import read_bias, read_linear
from tgi_trio.shard.cpu_backend.kinds.packing import Packing
from tgi_trio.shard.cpu_backend.operations.adapted_sites import SiteRecorder
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.packing import interleave
from tgi_trio.shard.cpu_backend.tables import (
    ACTIVATIONS,
    MIXTURE,
    ROUTINGS,
    RUN,
    Buffer,
    Code,
    Epilogue,
)
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL, SPARE_ROWS


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a mixture's results go, and how."""

    target: Buffer  # HIDDEN, or BRANCH if a norm follows
    scale: float  # of the result when it is added
    activation: str
    hidden: int


def pad_to_panel(count: int) -> int:
    """Return the number of outputs with which a linear layer of `count` outputs is stored."""
    return -(-count // PANEL) * PANEL


@dataclass(frozen=True, slots=True)
class _Arranged:
    """Activations that are sorted by expert."""

    row: int  # of ARRANGE
    feeder: int  # the row that writes them
    coded: bool  # as codes


def add_mixture(
    writer: OperationWriter,
    refs: ExpertsRefs,
    spec: ExpertsSpec,
    branch: Branch,
    feeder: int,
    sites: SiteRecorder,
) -> None:
    """Add a mixture; `feeder`: the row of the norm that writes its activations.

    `sites`: get the linears that adapters may change. Raises ModelLoadError as the weights do.
    """
    mixture = MixtureWriter(writer, refs, spec, branch, sites=sites)
    mixture.route(feeder)
    mixture.mix(feeder)


class MixtureWriter:
    """Writes a mixture whose router may read a different norm than its experts.

    `feeder` is the row of the norm that writes the activations. Both methods raise ModelLoadError
    as the weights do.
    """

    def __init__(
        self,
        writer: OperationWriter,
        refs: ExpertsRefs,
        spec: ExpertsSpec,
        branch: Branch,
        expert_scale: VectorRef | None = None,
        sites: SiteRecorder | None = None,
    ) -> None:
        """`expert_scale`: a factor for each expert's weight.

        `sites`: as for `add_mixture`; None: adapters change none of its linears.
        """
        self._sites = sites
        self._writer = writer
        self._refs = refs
        self._spec = spec
        self._branch = branch
        self._feeder = 0
        self._facts = self._keep_facts(expert_scale)

    def route(self, feeder: int, scale: float = 1.0) -> None:
        """Add the router and its choice; `scale`: of the router's logits."""
        self._writer.linear(
            self._refs.router,
            Buffer.NORMED,
            Buffer.ROUTED,
            feeder=feeder,
            scale=scale,
            cap=self._spec.logit_cap,
            unrounded=True,
        )  # `width`: the experts, padded
        width = pad_to_panel(self._spec.count)
        self._writer.add(Code.ROUTE, facts=self._facts, width=width)

    def mix(self, feeder: int) -> None:
        """Add the experts, with compression of tokens before and after if there is any."""
        self._feeder = feeder
        if self._refs.entry is None or self._refs.exit is None:
            self._mix(self._branch, self._refs.shared)
        else:
            self._mix_compressed(self._refs.entry, self._refs.exit)

    def _mix_compressed(self, entry: LinearRef, leave: LinearRef) -> None:
        """Add experts with compressed input and output; their sum is in BRANCH.

        The shared expert reads uncompressed tokens. It comes before ARRANGE, whose forms may
        overwrite those of uncompressed tokens.
        """
        writer, branch, width = self._writer, self._branch, self._spec.latent_width
        writer.linear(entry, Buffer.NORMED, Buffer.PROJECTED, feeder=self._feeder)
        if self._refs.shared is not None:
            self._share(self._refs.shared)
        self._pass_on(Buffer.PROJECTED, width)
        self._feeder = len(writer.rows) - 1
        self._mix(Branch(Buffer.BRANCH, 1.0, branch.activation, width), None)
        self._pass_on(Buffer.BRANCH, width)
        writer.linear(
            leave, Buffer.NORMED, branch.target, epilogue=Epilogue.ADD, scale=branch.scale
        )

    def _pass_on(self, source: Buffer, width: int) -> None:
        """Convert compressed tokens to the forms that products read."""
        self._writer.add(
            Code.PASS_ON, source=source, target=Buffer.NORMED, inputs=width, span=width
        )

    def _mix(self, branch: Branch, shared: MlpRefs | None) -> None:
        """Add experts, and the `shared` one.

        Activations are arranged first, since what follows may overwrite some of their forms.
        """
        writer, refs, spec = self._writer, self._refs, self._spec
        rows_per_token = spec.per_token
        writer.widest = max(writer.widest, rows_per_token * spec.width)
        inner = self._find_packing([expert.inner for expert in refs.experts])
        arranged = self._arrange(inner, branch)
        if shared is not None:
            self._share(shared)
        gated, paired = refs.experts[0].gated, refs.experts[0].paired
        if inner is not None:
            writer.quantised.add(len(writer.rows), inner)
        inner_row = len(writer.rows)
        sites = None if spec.stacked else self._sites
        if sites is not None:
            sites.add_experts(
                "expert inner",
                [expert.inner for expert in refs.experts],
                Buffer.ARRANGED,
                paired=gated and not paired,
                feeder=arranged.feeder,
                arranged=arranged.row,
                coded=arranged.coded,
            )
        self._experts(
            [expert.inner for expert in refs.experts], inner, Buffer.ARRANGED, Buffer.INNER,
            paired=gated and not paired, width=spec.width, **self._activated(gated=gated),
        )  # fmt: skip
        down = self._find_packing([expert.down for expert in refs.experts])
        writer.feeder = inner_row
        if sites is not None:
            downs = [expert.down for expert in refs.experts]
            sites.add_experts("expert down", downs, Buffer.INNER, feeder=inner_row)
        inner_width = rows_per_token * spec.width
        writer.feed(Buffer.INNER, inner_width, down, 0, rows_per_token=rows_per_token)
        self._experts(
            [expert.down for expert in refs.experts], down, Buffer.INNER, branch.target,
            width=branch.hidden, epilogue=Epilogue.ADD, scale=branch.scale,
        )  # fmt: skip

    def _keep_facts(self, expert_scale: VectorRef | None) -> int:
        spec, bias = self._spec, self._refs.choice_bias
        facts = np.zeros((1,), MIXTURE)
        for name in ("count", "per_token", "normalise", "groups", "groups_used", "jitter", "scale"):
            facts[name] = getattr(spec, name)
        facts["weighs_inputs"] = spec.weighs_inputs
        facts["routing"] = ROUTINGS[spec.routing]
        for name in ("limit", "raised", "bounds_opened"):
            facts[name] = getattr(spec, name)
        facts["paired"] = self._refs.experts[0].paired
        if bias is not None:
            values = self._writer.source.vector(bias.name, bias.size)
            facts["choice_bias"] = self._writer.keep(np.pad(values, (0, -len(values) % LANES)))
        if expert_scale is not None:
            values = self._writer.source.vector(expert_scale.name, expert_scale.size)
            facts["expert_scale"] = self._writer.keep(values)
        return self._writer.keep(facts)

    def _arrange(self, packing: Packing | None, branch: Branch) -> _Arranged:
        """Add ARRANGE; return what it writes. QUANTISE has reordered inputs before it if the router
        needs an order.
        """
        writer = self._writer
        writer.feeder, before = self._feeder, len(writer.rows)
        writer.feed(Buffer.NORMED, branch.hidden, packing, 0)
        feeder = before if len(writer.rows) > before else self._feeder
        coded, row = packing is not None, len(writer.rows)
        writer.add(
            Code.ARRANGE,
            facts=self._facts,
            source=Buffer.NORMED,
            target=Buffer.ARRANGED,
            inputs=branch.hidden,
            epilogue=int(branch.target == Buffer.BRANCH),  # which is zeroed
        )
        return _Arranged(row, feeder, coded)

    def _share(self, shared: MlpRefs) -> None:
        """Add the shared expert, gated if it has a router of its own."""
        writer, branch, router = self._writer, self._branch, self._refs.shared_router
        spec = self._spec
        if router is not None:
            if self._sites is not None:
                self._sites.add("shared router", router, Buffer.NORMED, feeder=self._feeder)
            writer.linear(router, Buffer.NORMED, Buffer.OPENED, feeder=self._feeder, unrounded=True)
        if self._sites is not None:
            self._sites.add(
                "shared inner",
                shared.inner,
                Buffer.NORMED,
                paired=shared.gated,
                feeder=self._feeder,
            )
        writer.linear(
            shared.inner,
            Buffer.NORMED,
            Buffer.INNER,
            paired=shared.gated,
            feeder=self._feeder,
            width=self._spec.shared_width,
            clip=spec.limit if spec.shared_limit is None else spec.shared_limit,
            bounds_opened=spec.bounds_opened,
            raised=spec.raised,
            **self._activated(gated=shared.gated),
        )
        if self._sites is not None:
            self._sites.add("shared down", shared.down, Buffer.INNER)
        if router is None:
            writer.linear(
                shared.down, Buffer.INNER, branch.target, epilogue=Epilogue.ADD, scale=branch.scale
            )
            return
        writer.linear(shared.down, Buffer.INNER, Buffer.SHARED)
        writer.add(
            Code.JOIN,
            facts=self._facts,
            source=Buffer.SHARED,
            target=branch.target,
            width=branch.hidden,
            scale=branch.scale,
        )

    def _activated(self, *, gated: bool) -> dict[str, Any]:
        """Return the epilogue of a first linear layer."""
        epilogue = Epilogue.GATE if gated else Epilogue.ACTIVATE
        return {"epilogue": epilogue, "activation": ACTIVATIONS[self._branch.activation]}

    def _find_packing(self, linears: Sequence[LinearRef]) -> Packing | None:
        """Return how all these are packed as stored; None: they are dequantised."""
        source = self._writer.source
        parts = [part for each in linears for part in read_linear(source, each, every_unit).parts]
        packing = self._writer.packing(parts)
        apart = packing is not None and (packing.order or packing.kind.turned)
        return None if apart else packing

    def _experts(
        self,
        linears: Sequence[LinearRef],
        packing: Packing | None,
        source: Buffer,
        target: Buffer,
        *,
        paired: bool = False,
        **fields: Any,
    ) -> None:
        """Add a linear layer of every expert; `paired` as for `OperationWriter.linear`."""
        writer = self._writer
        table = np.zeros((len(linears), 3), np.int64)  # as `kernels/mixture/mixing.py` reads it
        for expert, linear in zip(table, linears, strict=True):
            weights = read_linear(writer.source, linear, every_unit)
            bias = read_bias(writer.source, linear, every_unit)
            if packing is None:
                expert[:2] = writer.pack_numbers(weights.parts, paired=paired)
            else:
                expert[0] = writer.pack_codes(weights.parts, packing, paired=paired)
            if bias is not None:
                expert[2] = writer.keep(interleave(*np.split(bias, 2)) if paired else bias)
        writer.add(
            Code.EXPERTS,
            facts=self._facts,
            source=source,
            target=target,
            weights=writer.keep(table),
            inputs=weights.shape[1],
            outputs=weights.shape[0],
            **fields,
        )


def find_mixture_buffers(members: int, changed: int, experts: int, size: int) -> dict[Buffer, int]:
    """Return the bytes of the buffers of mixtures.

    `members`: pairs of a token and an expert of its; `changed`: as many, if adapters may change
    experts, else 0; `experts`: padded; `size`: of a hidden state.
    """
    return {
        Buffer.CHOSEN: members * 4,
        Buffer.PARTS: members * 4,
        Buffer.GROUPS: 12 * (1 + experts),
        Buffer.MEMBERS: members * 4,
        Buffer.ARRANGED: (members + SPARE_ROWS) * size * 4,
        Buffer.MEMBER_RUNS: 8 * (1 + (RUN + 1) * changed) if changed else 0,
        Buffer.MEMBER_RUN_OF: changed * 4,
        Buffer.UNCODED: (changed + SPARE_ROWS) * size * 4 if changed else 0,
    }
