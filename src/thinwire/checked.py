"""Arguments are checked when they are given, and the annotation is the check.

`@checked` on a class or a function reads its annotations once. From then on every argument that a caller gives is
checked before the body runs: `density: Share` refuses 1.5, NaN, True and "x", and says what it expected. A number is
Python's int or float, or derives from them as numpy.float64 does. A bool is none. Nor are tensors and NumPy's other
scalars, which plans and states could not save: convert them with int() or float(). In `Annotated[type, note]` a note
narrows the type: `note.kind(type)` is the kind of those values that pass.
"""

import math
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from inspect import Parameter, signature
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints, overload

T = TypeVar("T", bound=Callable[..., object])
Judge = Callable[[Any], int]
FITS, OUTSIDE, FOREIGN = range(3)
"""What a judge says: it fits, it is out of range, or it is of another type."""
_LARGEST = sys.float_info.max


class Kind(NamedTuple):
    """Judges a value, and says in words what was expected. `sure`: types whose instances all fit, so none is judged."""

    judge: Judge
    words: str
    sure: frozenset[type] = frozenset()


@dataclass(frozen=True)
class Range:
    """Numbers within bounds, said in `words`: infinity only with most=math.inf, and NaN only with nan=True."""

    words: str
    least: float = -_LARGEST
    most: float = _LARGEST
    above: float | None = None
    below: float | None = None
    nan: bool = False

    def kind(self, base: Any) -> Kind:
        """Return the kind of int, or of float, within the range."""
        numbers, nan = _NUMBERS[base], self.nan
        low = self.least if self.above is None else math.nextafter(self.above, math.inf)
        high = self.most if self.below is None else math.nextafter(self.below, -math.inf)

        def judge(value: Any) -> int:
            if not isinstance(value, numbers) or isinstance(value, bool):
                return FOREIGN
            return FITS if low <= value <= high or (nan and value != value) else OUTSIDE

        return Kind(judge, self.words)

    def __repr__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Such:
    """Values that pass a test, by default all; others count as values of another type. `words` say which pass."""

    words: str
    passes: Callable[[Any], bool] | None = None

    def kind(self, base: Any) -> Kind:
        """Return the kind of those values of `base` that pass."""
        passes = self.passes
        if passes is None:
            return Kind(lambda value: FITS, self.words)
        judge = _kind(base).judge
        return Kind(lambda value: judge(value) or (FITS if passes(value) else FOREIGN), self.words)

    def __repr__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Like:
    """Instances of the type, or of a class or protocol that a caller can use instead: `another`."""

    another: type

    def kind(self, base: Any) -> Kind:
        """Return the kind of both."""
        return _union(base, self.another)


BODY = Such("checked by the body")
"""`Annotated[type, BODY]` leaves it to the body to refuse other types, in words that help more."""

_LONGEST = 2**63 - 1  # no tensor has more elements, and no file more bytes

Whole = Annotated[int, Range("an integer")]
"""Any whole number."""
Size = Annotated[int, Range("an integer of at least 0", least=0, most=_LONGEST)]
"""How many there are, perhaps none."""
Count = Annotated[int, Range("an integer of at least 1", least=1, most=_LONGEST)]
"""How many there are, at least one."""
Width = Annotated[int, Range("at least 1 element, and fewer than 2^31", least=1, most=2**31 - 1)]
"""How many adjacent elements belong together."""
Number = Annotated[float, Range("a finite number")]
"""Any finite number."""
Amount = Annotated[float, Range("a finite number of at least 0", least=0)]
"""A number that is not negative."""
Positive = Annotated[float, Range("a finite number above 0", above=0)]
"""A number above 0."""
Multiple = Annotated[float, Range("a finite number of at least 1", least=1)]
"""How many times as many, at least as many."""
Share = Annotated[float, Range("a share of the elements, above 0 and at most 1", above=0, most=1)]
"""A share of a vector's elements, never none of them."""
Fraction = Annotated[float, Range("a fraction of at least 0 and below 1", least=0, below=1)]
"""A fraction of something, never all of it."""
Part = Annotated[float, Range("a share from 0 to 1", least=0, most=1)]
"""Anything from nothing to all."""
Seconds = Annotated[float, Range("a finite number of seconds, at least 0", least=0)]
"""A duration."""
Bandwidth = Annotated[float, Range("bytes per second, at least 0; math.inf for a free link", least=0, most=math.inf)]
"""Bytes per second, perhaps infinitely many."""


OnError = Callable[[Exception, Mapping[str, object]], None]
"""Is called with an error before it is raised, and with the arguments that were given, by name."""


@overload
def checked(target: T, /) -> T: ...
@overload
def checked(*, on_error: OnError) -> Callable[[T], T]: ...
def checked(target: Any = None, /, *, on_error: OnError = lambda error, given: None) -> Any:
    """Check every argument of this class or function against its annotation at every call: TypeError, ValueError."""
    if target is None:
        return lambda function: _checking(function, on_error)
    if not isinstance(target, type):
        return _checking(target, on_error)
    method = "__init__" if "__init__" in vars(target) else "__new__"  # a NamedTuple has the latter
    setattr(target, method, _checking(getattr(target, method), on_error))
    return target


def _checking(function: Callable[..., object], on_error: OnError) -> Callable[..., object]:
    parameters = signature(function).parameters
    names, takes_any = tuple(parameters), any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
    bound = int(names[:1] in (("self",), ("cls",)))  # most are called with nothing but names

    @cache  # at the first call, when all that annotations may name has been defined
    def kinds() -> Mapping[str, Kind]:
        found = get_type_hints(function, include_extras=True)
        return {name: _kind(found[name]) for name in names if name in found}

    @wraps(function)
    def checking(*args: Any, **kwargs: Any) -> object:
        kind_of = kinds()
        given = kwargs if len(args) == bound else {**dict(zip(names, args, strict=False)), **kwargs}
        for name, value in given.items():
            error: Exception | None = None
            if name in kind_of:
                judge, words, sure = kind_of[name]
                if type(value) not in sure and (verdict := judge(value)):
                    error = _refusal(verdict, name, value, words)
            elif name not in names and not takes_any:
                owner = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__")
                error = TypeError(f"{owner} has no argument {name!r}; it takes {', '.join(names[bound:])}")
            if error is not None:
                on_error(error, given)
                raise error
        return function(*args, **kwargs)

    return checking


def _refusal(verdict: int, name: str, value: object, words: str) -> Exception:
    one = hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1  # NumPy's scalars, and tensors
    hint = "; convert it with .item()" if one else ""
    return (ValueError if verdict == OUTSIDE else TypeError)(f"{name} is {value!r:.200}; expected {words}{hint}")


def _kind(annotation: Any) -> Kind:
    """Return the kind of an annotation. Raises TypeError for one that cannot be checked."""
    make = _KINDS.get(get_origin(annotation))
    if make is not None:
        return make(*get_args(annotation))
    if annotation in _NUMBERS:
        return Range(f"a finite {annotation.__name__}").kind(annotation)
    if annotation in (Any, object):
        return Kind(lambda value: FITS, "anything")
    if isinstance(annotation, TypeVar):
        return _kind(annotation.__bound__)
    class_: Any = type(None) if annotation is None else get_origin(annotation) or annotation
    structural = getattr(class_, "_is_protocol", False)  # which classes have as much as their instances

    def judge(value: Any) -> int:
        return FITS if isinstance(value, class_) and not (structural and isinstance(value, type)) else FOREIGN

    isinstance(None, class_)  # now, and not at some later call, if it cannot be asked
    return Kind(judge, _article(class_), frozenset({class_}))


def _article(class_: type) -> str:
    if class_ is type(None):
        return "None"
    if class_ is bool:
        return "True or False"
    name = class_.__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _union(*options: Any) -> Kind:
    kinds = [_kind(option) for option in options]
    judges = [kind.judge for kind in kinds]

    def judge(value: Any) -> int:
        verdict = FOREIGN
        for each in judges:
            if not (found := each(value)):
                return FITS
            verdict = min(verdict, found)
        return verdict

    *others, last = (kind.words for kind in kinds)
    return Kind(judge, f"{', '.join(others)}, or {last}", frozenset().union(*(kind.sure for kind in kinds)))


def _literal(*options: Any) -> Kind:
    types_ = {type(option) for option in options}

    def judge(value: Any) -> int:
        if type(value) not in types_:
            return FOREIGN
        return FITS if value in options else OUTSIDE

    return Kind(judge, f"one of {', '.join(map(str, options))}" if options[1:] else repr(options[0]))


def _each(container: Any, item: Any) -> Kind:
    """Return the kind of a container whose elements are all of the kind of `item`. A str is no container."""
    element = _kind(item)
    each, sure = element.judge, element.sure
    finite = issubclass(container, Collection)  # an iterator would be spent

    def judge(value: Any) -> int:
        if not isinstance(value, container) or isinstance(value, (str, bytes)):
            return FOREIGN
        if not (finite or isinstance(value, Collection)) or sure.issuperset(map(type, value)):
            return FITS
        return max(map(each, value), default=FITS)

    return Kind(judge, f"{_article(container)}, each {element.words}")


def _tuple(*items: Any) -> Kind:
    if items[-1:] == (...,):
        return _each(tuple, items[0])
    kinds = [_kind(item) for item in items]
    judges = [kind.judge for kind in kinds]

    def judge(value: Any) -> int:
        if not isinstance(value, tuple) or len(value) != len(judges):
            return FOREIGN
        worst = FITS
        for each, part in zip(judges, value, strict=True):  # a third faster than a generator; regions are many
            worst = max(worst, each(part))
        return worst

    return Kind(judge, f"a tuple ({', '.join(kind.words for kind in kinds)})")


def _mapping(key: Any, item: Any) -> Kind:
    keys, items = _kind(key), _kind(item)

    def judge(value: Any) -> int:
        if not isinstance(value, Mapping):
            return FOREIGN
        return max((*map(keys.judge, value), *map(items.judge, value.values())), default=FITS)

    return Kind(judge, f"a Mapping from {keys.words} to {items.words}")


_NUMBERS: Mapping[Any, Any] = {int: int, float: (int, float)}
_KINDS: Mapping[Any, Callable[..., Kind]] = {
    Annotated: lambda base, note: note.kind(base),
    Union: _union,
    types.UnionType: _union,
    Literal: _literal,
    Callable: lambda *_: Kind(lambda value: FITS if callable(value) else FOREIGN, "a function"),
    Sequence: lambda item: _each(Sequence, item),
    Iterable: lambda item: _each(Iterable, item),
    Mapping: _mapping,
    dict: _mapping,
    tuple: _tuple,
}
