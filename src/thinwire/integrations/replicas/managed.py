"""Which parameters DDP reduces, which have sparse gradients, and how large its buckets are."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

_FIRST_BYTES = 1 << 20  # of the first bucket where bucket_cap_mb is left to DDP


def managed(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Return the parameters that DDP reduces; RuntimeError if they have changed since, TypeError if complex."""
    names: dict[nn.Parameter, str] = {}
    for prefix, module in model.module.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if p.requires_grad and f"{prefix}.{name}" not in model.parameters_to_ignore:
                names.setdefault(p, f"{prefix}.{name}".removeprefix("."))
    if len(names) != model._get_ddp_logging_data()["num_parameter_tensors"]:
        raise RuntimeError("requires_grad has changed since the module was wrapped in DDP: wrap it again")
    if complex_ := [name for p, name in names.items() if p.is_complex()]:
        raise TypeError(
            f"{complex_[0]} is complex, and DDP's hooks see only half of its gradient: keep it as torch.view_as_real"
        )
    return {name: p for p, name in names.items()}


def kept_alike(model: DistributedDataParallel) -> Callable[[], dict[str, torch.Tensor]]:
    """Return what lists the parameters, and the buffers that DDP sends to all ranks but running statistics."""
    module, ignored, sent = model.module, set(model.parameters_to_ignore), model.broadcast_buffers

    def everything() -> dict[str, torch.Tensor]:
        own = {x for m in module.modules() if isinstance(m, _NormBase) for x in m.buffers(recurse=False)}
        buffers = [(name, x) for name, x in module.named_buffers() if sent and x not in own]
        return {name: x for name, x in (*module.named_parameters(), *buffers) if name not in ignored}

    return everything


def sparse_weights(module: nn.Module) -> set[torch.Tensor]:
    """Return the weights of the module's sparse embeddings, whose gradients are sparse."""
    embeddings = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return {m.weight for m in embeddings if m.sparse}


def bucket_caps(model: DistributedDataParallel) -> list[int]:
    """How many bytes fill DDP's first bucket, and how many each later one?"""
    other = int(model.bucket_bytes_cap)
    return [_FIRST_BYTES if getattr(model, "bucket_bytes_cap_default", False) else other, other]
