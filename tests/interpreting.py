"""Triton's interpreter in two thirds of the time, and as strict in every version as in 3.9."""

from functools import partialmethod
from types import FunctionType
from typing import Any


def hasten(interpreter: Any) -> None:
    """Have each launch patch all that any function sees of the language, and calls within it nothing.

    By itself the interpreter does so at each call of a function within a kernel, too, and looks at all names there.
    """
    patch, language, launches = interpreter._patch_lang, interpreter.tl, list[Any]()
    sees_all = FunctionType((lambda: None).__code__, {"tl": language, "core": language.core})

    def patch_once(function: Any) -> Any:
        if launches:
            return None
        scope = patch(sees_all)
        restore = scope.restore

        def end() -> None:
            launches.clear()
            restore()

        scope.restore = end
        launches.append(function)
        return scope

    interpreter._patch_lang = patch_once


def refuse_integer_masks(interpreter: Any) -> None:
    """Have it refuse masks of integers: it makes them of a scalar and a block, and from Triton 3.9 on takes no such."""
    builder = interpreter.InterpreterBuilder
    for name, at in (("create_masked_load", 1), ("create_masked_store", 2)):
        setattr(builder, name, partialmethod(_with_a_true_mask, getattr(builder, name), at))


def _with_a_true_mask(builder: Any, access: Any, at: int, *args: Any) -> Any:
    mask = args[at].data
    if mask.dtype != bool:
        raise ValueError(f"a mask of {mask.dtype}; expected bool: compare a block with a limit, if need be, of 0")
    return access(builder, *args)
