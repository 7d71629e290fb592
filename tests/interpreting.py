"""Triton's interpreter in two thirds of the time.

By itself it patches Triton's language at each call of a function within a kernel, too, and looks at all names there.
"""

from types import FunctionType
from typing import Any


def hasten(interpreter: Any) -> None:
    """Have each launch patch all that any function sees of the language, and calls within it nothing."""
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
