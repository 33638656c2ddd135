"""New weights for a rank of vLLM, in place; and what its ranks on CPUs do otherwise than vLLM.

vLLM's own ``reload_weights`` (0.32) leaves the ranks of a CPU engine of TP degree 2 with wrong weights, silently:
layers there keep packed copies. So layers pack nothing here, a rank's parameters are what it computes with, and loading
is what vLLM does at its start. Invariant: each tensor passes its checksum in the rank that loads it.

A prompt that is computed in parts draws a token after each part, and vLLM takes those draws back by the offset of the
request's generator, which generators on CPUs do not have: its rank would die. So generators are kept out of its reach.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers import utils
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from libra.resources.types import WeightVersion
from libra.resources.weights import checked_tensors


def _compute_with_the_parameter(layer: Any, remove_weight: bool) -> None:
    """In place of vLLM's choice of a packed kernel for a layer on CPUs."""
    layer.cpu_linear = torch.nn.functional.linear


def _generators_untouched(bookkeeping: Callable[..., Any]) -> Callable[..., Any]:
    """A runner's bookkeeping after a step, without the generators of requests whose draw it discards. One that has
    sampled nothing yet begins anew, so that its tokens do not depend on the parts; of one whose KV is computed again
    the draw stays drawn."""

    @wraps(bookkeeping)
    def keeping(runner: Any, *arguments: Any, **named: Any) -> Any:
        batch = runner.input_batch
        discarded = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
        kept = {int(row): batch.generators.pop(int(row)) for row in discarded if int(row) in batch.generators}
        try:
            return bookkeeping(runner, *arguments, **named)
        finally:
            batch.generators.update(kept)
            for row, generator in kept.items():
                if not runner.requests[batch.req_ids[row]].output_token_ids:
                    generator.manual_seed(generator.initial_seed())

    return keeping


# Every rank imports this module before it builds the model.
CPUModelRunner._bookkeeping_sync = _generators_untouched(CPUModelRunner._bookkeeping_sync)
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
