"""An engine's KV tensors as `libra.resources.kv.move` takes them, wherever they lie.

Invariant: the cache shares the tensors' memory; what cannot be shared is refused, never copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from libra.native.pages import PagedCache
from libra.resources.errors import KVError
from libra.resources.kv.gpu import DeviceCache
from libra.resources.kv.move import RankCache


def rank_cache(tensors: Sequence[torch.Tensor]) -> RankCache:
    """The cache of one rank's tensors, one a layer in the layers' order, [block, head, …] of any element type.

    On a GPU, moves come after what the calling thread's current torch stream holds. `KVError` if the tensors lie on
    anything but one CPU or one CUDA GPU, or their pages are not contiguous."""
    places = sorted({str(tensor.device) for tensor in tensors})
    if len(places) != 1 or tensors[0].device.type not in ("cpu", "cuda"):
        raise KVError(f"KV tensors on {', '.join(places) or 'no device'}: all must lie on one CPU or one CUDA GPU")
    device = tensors[0].device
    try:
        as_bytes = [tensor.detach().view(torch.uint8) for tensor in tensors]
        if device.type == "cpu":
            return PagedCache([tensor.numpy() for tensor in as_bytes])
        return DeviceCache(as_bytes, device.index, lambda: torch.cuda.current_stream(device).cuda_stream)
    except (ValueError, RuntimeError) as error:
        shape, strides = tuple(tensors[0].shape), tensors[0].stride()
        raise KVError(f"KV tensors of shape {shape} and strides {strides} cannot be staged: {error}") from error
