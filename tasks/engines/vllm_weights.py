"""New weights for a rank of vLLM, in place.

vLLM's own ``reload_weights`` (0.32) leaves the ranks of a CPU engine of TP degree 2 with wrong weights, silently:
layers there keep packed copies. So layers pack nothing here, a rank's parameters are what it computes with, and loading
is what vLLM does at its start. Invariant: each tensor passes its checksum in the rank that loads it.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import utils

from libra.resources.types import WeightVersion
from libra.resources.weights import checked_tensors


def _compute_with_the_parameter(layer: Any, remove_weight: bool) -> None:
    """In place of vLLM's choice of a packed kernel for a layer on CPUs."""
    layer.cpu_linear = torch.nn.functional.linear


# Every rank imports this module before it builds the model.
utils.dispatch_cpu_unquantized_gemm = _compute_with_the_parameter


class InPlaceWeights:
    """What vLLM mixes into its worker class (``worker_extension_cls``)."""

    model_runner: Any

    def libra_load(self, version: int, path: str, digest: str) -> None:
        """Load a published version. vLLM deals the tensors to the ranks itself."""
        weights = WeightVersion(version, path, digest)
        tensors = ((name, torch.from_numpy(tensor)) for name, tensor in checked_tensors(weights))
        with torch.no_grad():
            self.model_runner.get_model().load_weights(tensors)
