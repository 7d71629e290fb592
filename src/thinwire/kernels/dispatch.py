"""Which implementation of a kernel runs? Each call decides, from the tensors it is given.

An operation has up to three implementations: in plain torch (the reference, which says what it computes), in Numba for
main memory, and for a GPU. All compute the same thing; the choice changes only the time.
"""

import os
import warnings
from collections.abc import Callable
from functools import cache, cached_property, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from operator import attrgetter
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, final

import torch
from torch import Tensor

from thinwire import waits
from thinwire.kernels.parts import Parts
from thinwire.kernels.sums import Sum

P = ParamSpec("P")
R = TypeVar("R")
Backend = Literal["reference", "cpu", "gpu"]
VARIABLE = "THINWIRE_BACKEND"
"""Environment variable, read when thinwire is imported. "reference" has every kernel run in plain torch."""
_DEVICE, _DTYPE = attrgetter("device"), attrgetter("dtype")
_GPUS = {"cuda"}
_GPU_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


@final
class Kernel(Generic[P, R]):
    """An operation with the signature of `reference`. Calling it runs the implementation that suits its tensors.

    `reference`, `cpu` and `gpu` are the implementations, for callers that want a particular one. `by` names the
    arguments whose device, layout and dtype decide; a star marks a sequence of tensors, and a `Sum` says which of its
    own do. Kernels on codes and bytes, and sums that are rounded, take any dtype; the others run in Numba only if all
    tensors are float32 or all are float64. The functions of the same name in the folder's `cpu.py` and `triton.py` are
    the other implementations; where there is none, plain torch is as good, and the reference runs.
    """

    def __init__(self, reference: Callable[P, R], *, by: str, any_dtype: bool = False) -> None:
        self.reference, self._any_dtype = reference, any_dtype
        self.cpu = self._named("cpu")
        places = list(signature(reference).parameters)
        names = [(name.removeprefix("*"), name.startswith("*")) for name in by.split()]
        self._deciding = [(places.index(name), name, several) for name, several in names]
        update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the implementation that suits the arguments."""
        run: Callable[P, R] = getattr(self, self.backend(*args, **kwargs))
        return run(*args, **kwargs)

    def backend(self, *args: P.args, **kwargs: P.kwargs) -> Backend:
        """Return which implementation would run for these arguments; if there is none of that name, the reference does.

        Plain torch takes tensors that are not contiguous, lie on several devices, or have a dtype that no loop is
        compiled for. With THINWIRE_BACKEND=reference it takes all of them.
        """
        found, any_dtype = list[Tensor](), self._any_dtype
        for place, name, several in self._deciding:
            value: Any = args[place] if place < len(args) else kwargs.get(name, ())
            columns: Any = (value,)
            if isinstance(value, Sum):
                columns, several, any_dtype = value.deciding, True, any_dtype or value.seeds is not None
            for column in columns:
                if isinstance(column, Parts):  # all of them lie in one
                    found.append(column.flat)
                else:
                    found.extend(column if several else (column,))
        devices, dtypes = set(map(_DEVICE, found)), set(map(_DTYPE, found))
        if _ONLY_REFERENCE or len(devices) != 1 or not all(map(Tensor.is_contiguous, found)):
            return "reference"
        kind = devices.pop().type
        if kind in waits.HOST:
            return "cpu" if any_dtype or dtypes == {torch.float32} or dtypes == {torch.float64} else "reference"
        return "gpu" if kind in _GPUS and (any_dtype or dtypes <= _GPU_DTYPES) else "reference"

    def on(self, backend: Backend) -> Callable[P, R]:
        """Return the implementation of this name."""
        return cast(Callable[P, R], getattr(self, backend))

    @cached_property
    def gpu(self) -> Callable[P, R]:
        """The implementation on a GPU; the reference where there is no Triton."""
        return self._named("triton") if triton_is_there() else self.reference

    def _named(self, file: str) -> Callable[P, R]:
        """The function of the same name in another file of the folder, or else the reference."""
        module = self.reference.__module__.removesuffix("reference") + file
        return getattr(import_module(module) if find_spec(module) else None, self.reference.__name__, self.reference)


@cache
def triton_is_there() -> bool:
    """Whether Triton can be imported; warns if not. Importing takes a while, so it waits for a tensor on a GPU."""
    try:
        import_module("thinwire.kernels.triton")
    except ImportError as error:
        warnings.warn(
            f"kernels on the GPU run in plain torch, which is slower, as Triton cannot be imported: {error}",
            stacklevel=4,
        )
        return False
    return True


def only_reference(asked: str | None) -> bool:
    """Return whether this value of THINWIRE_BACKEND wants the reference alone. Raises ValueError for an unknown one."""
    if asked in (None, ""):
        return False
    if asked == "reference":
        return True
    raise ValueError(
        f"{VARIABLE}={asked!r} is unknown; expected reference, or unset it to let each call's tensors decide"
    )


_ONLY_REFERENCE = only_reference(os.environ.get(VARIABLE))
