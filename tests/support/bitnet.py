"""Matrices as transformers stores them for BitNet."""

from __future__ import annotations

import torch

from tests.support.quantised import Array, Store, Tensors


def store_bitnet(form: str, *, divides: bool = False) -> Store:
    """Store as transformers does for BitNet: "packed", "unpacked", or "trained" as it is.

    `divides`: the scale is one over what a weight is. transformers says what is packed and rounded.
    """
    from transformers.integrations import bitnet

    def store(module: str, weight: Array) -> tuple[Tensors, Array]:
        trained = torch.from_numpy(weight)
        with torch.compiler.set_stance("force_eager"):
            exact = bitnet.WeightQuant.apply(trained)
        if form == "trained":
            return {f"{module}.weight": trained}, exact.numpy()
        scale = exact.abs().max()
        codes = exact.div(scale).round()
        scale = 1 / scale if divides else scale
        exact = codes / scale if divides else codes * scale
        if form == "packed":
            codes = bitnet.pack_weights(codes.clone())
        stored = {f"{module}.weight": codes, f"{module}.weight_scale": scale.reshape(1)}
        return stored, exact.numpy()

    return store


BITNET = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
BITNET_OFFLINE = BITNET | {"quantization_mode": "offline"}
BITNET_ONLINE = BITNET | {"quantization_mode": "online"}
