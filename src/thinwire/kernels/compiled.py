"""How Numba compiles the loops: on first use, without the GIL, once a machine, and cached on disk.

Loops compile for several types of arrays, so they carry no annotations. Several tensors go into one call: Numba is
given their addresses, see `parts`, and sees each as an array. A call costs some 10 microseconds before it does
anything, and what surrounds it in Python as much. For the small tensors of a bucket, that is more than the loop takes.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path
from typing import Any, final

import numba.core.caching
import numba.extending
from llvmlite import ir
from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock

KERNELS = Path(__file__).parent
_IMPORTS = re.compile(rb"^from thinwire\.kernels([.\w]*) import ([\w, ]*)", re.MULTILINE)
_MARK = ".thinwire-"
HOSTS = {KERNELS / f"{name}.py" for name in ("memory", "parts", "ranges", "replay", "streams", "sums")}
"""What calls loops, and is not compiled with them."""


def made_of(file: Path) -> set[Path]:
    """Return a file and those of this package that it imports, directly or not, but for the `HOSTS`."""
    found, ahead = set[Path](), {file}
    while ahead:
        found |= ahead
        imports = [each for file in ahead for each in _IMPORTS.findall(file.read_bytes())]
        bases = [(KERNELS.joinpath(*path.decode().split(".")), names.decode().split(", ")) for path, names in imports]
        modules = {module for base, names in bases for module in (base, *map(base.joinpath, names))}
        ahead = {file for module in modules if (file := module.with_suffix(".py")).is_file()} - found - HOSTS
    return found


@cache
def _mark(file: str, folder: Path) -> str:
    """Return what names loops of a file made of what it is now made of, and remove those made of anything else."""
    sources = b"\0".join(each.read_bytes() for each in sorted(made_of(Path(file))))
    mark = f"{_MARK}{hashlib.sha256(sources).hexdigest()[:16]}"
    for old in folder.glob(f"{Path(file).stem}.*{_MARK}*.nbc"):
        if mark not in old.name:
            old.unlink(missing_ok=True)  # whoever needs it compiles it anew
    return mark


@final
class _Cache(numba.core.caching.IndexDataCacheFile):
    """A loop's compiled versions on disk, each in a file that is named after all that it was made from.

    Numba goes by the date of the loop's own file, so it would go on using what the loop called before another changed.
    """

    def save(self, key: object, data: object) -> None:
        self._save_data(self._name(key), data)

    def load(self, key: object) -> Any:
        with suppress(FileNotFoundError):
            return self._load_data(self._name(key))

    def _name(self, key: object) -> str:
        made_from = repr((numba.__version__, key)).encode()
        return self._data_name(int.from_bytes(hashlib.sha256(made_from).digest()[:8]))


_held = set[Path]()
"""Loops that this process compiles: one as part of another."""


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process of this machine at a time compile a loop: the others find it on disk when their turn comes."""
    with ExitStack() as stack:
        if path not in _held:
            _held.add(path)
            stack.callback(_held.remove, path)
            with suppress(OSError):  # nothing can be written there, or locked
                flock(stack.enter_context(path.open("a")), LOCK_EX)
        yield


def _compiling(**options: Any) -> Callable[..., Any]:
    """Return a decorator that has loops compiled on first use."""

    def decorated(loop: Callable[..., Any]) -> Any:
        found = njit(nogil=True, cache=True, error_model="numpy", **options)(loop)
        with suppress(AttributeError):  # nothing is cached where nothing can be written, or compiled
            path, mark = found._cache.cache_path, _mark(loop.__code__.co_filename, Path(found._cache.cache_path))
            name, plain = found._cache._impl.filename_base, found.compile
            found._cache._cache_file, lock = _Cache(path, name + mark, None), Path(path, f"{name}.lock")

            def compile_alone(signature: object) -> object:
                with global_compiler_lock, _alone(lock):  # in this order, or two threads could wait for each other
                    return plain(signature)

            found.compile = compile_alone
        return found

    return decorated


compiled = _compiling(fastmath={"contract"})
reordering = _compiling(fastmath={"contract", "reassoc"})
"""Sums may be reordered, so that they vectorise."""
exactly = _compiling()
"""Every product and sum is rounded on its own, so any processor gives the bits of the reference."""
intrinsic: Callable[..., Any] = numba.extending.intrinsic
"""Instructions for LLVM, where Numba's loops cannot express them."""
overload: Callable[..., Any] = numba.extending.overload
"""Loops that Numba chooses among by the types of arguments: what is None then is known when they are compiled."""


@intrinsic
def _pointer(typing, address):
    """Return an address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@compiled
def vector(address, size, like):
    """Return the `size` elements at an address as an array of the dtype of `like`."""
    return numba.carray(_pointer(address), size, like.dtype)  # type: ignore[attr-defined]  # without types


def element(column: Any, i: Any) -> Any:
    """Return the i-th of an array, or None if there is no array."""
    return None if column is None else column[i]


@overload(element)
def _element(column, i):
    return (lambda column, i: None) if isinstance(column, types.NoneType) else (lambda column, i: column[i])
