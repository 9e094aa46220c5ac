"""What activations need beside their inputs."""

from __future__ import annotations

import numpy as np

from tgi_trio.model.matrices.roles import MlpRefs
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter


def keep_learned(writer: OperationWriter, mlp: MlpRefs) -> int:
    """Keep the parameters of xIELU for the kernels; return their address, 0 for none."""
    if not mlp.learned:
        return 0
    stored = [writer.source.vector(ref.name, ref.size)[0] for ref in mlp.learned]
    alpha_p, alpha_n, beta, eps = (np.float32(value) for value in stored)
    positive, negative = np.logaddexp(np.float32(0.0), (alpha_p, alpha_n))
    return writer.keep(np.array([positive, beta + negative, beta, eps], np.float32))
