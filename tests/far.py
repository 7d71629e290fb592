"""A device of the imagination: tensors in main memory that say they lie elsewhere, so that what lies there is counted.

As with a GPU, what is computed of tensors there lies there, and no operator but a copy takes tensors of both places.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_DEVICE = torch.device("meta")  # which a build without GPUs knows, too


class Far(Tensor):
    """A tensor there. `near`: what it is here."""

    near: Tensor

    @staticmethod
    def __new__(cls: type[Self], near: Tensor) -> Self:
        like: dict[str, Any] = {"dtype": near.dtype, "device": _DEVICE, "strides": near.stride()}
        made: Self = torch.Tensor._make_wrapper_subclass(cls, near.shape, **like)
        made.near = near
        return made

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


class _Both(TorchDispatchMode):
    """Sees to tensors that go from here to there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    far, name = any(isinstance(x, Far) for x in given), func.overloadpacket.__name__
    if name not in ("copy_", "_to_copy") and far and any(not isinstance(x, Far) and x.dim() for x in given):
        raise RuntimeError(f"{name} of tensors on two devices")
    if name == "copy_":
        far = isinstance(args[0], Far)
    elif kwargs.get("device") is not None:
        far = torch.device(kwargs["device"]) == _DEVICE
        kwargs = kwargs | {"device": "cpu"}
    known = {id(_near(x)): x for x in given}
    out = func(*tree_map(_near, args), **tree_map(_near, kwargs))
    return tree_map(lambda x: known.get(id(x), Far(x) if far else x) if isinstance(x, Tensor) else x, out)


def _near(x: Any) -> Any:
    return x.near if isinstance(x, Far) else x


@contextmanager
def moved_far(model: nn.Module) -> Iterator[None]:
    """Move a model there; within, tensors may go there and back."""
    gc.freeze()  # or `far_bytes` would look through a million older objects
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(Far(p.detach())))
    try:
        with _Both():
            yield
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as each rank began


def far_bytes() -> int:
    """Return how many bytes lie there."""
    gc.collect()
    storages = [x.near.untyped_storage() for x in gc.get_objects() if type(x) is Far]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())
