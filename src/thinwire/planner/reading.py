"""What a JSON document has, as the dataclasses that annotations name; an error names the field by its path."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

_DIGITS = 20  # of an integer; one with more could not be calculated with
_hints = cache(get_type_hints)


def parsed(text: str) -> Any:
    """Return what the JSON has. An absurdly long integer stays text, which no field takes for a number."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) <= _DIGITS else digits)


def built(kind: Any, raw: Any, at: str) -> Any:
    """Return the value of that kind that `raw` stands for: a dataclass for an object, a tuple for an array.

    What does not fit is returned as it is: whoever takes it checks it. Raises ValueError, which names the field.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return built(parts[0], raw, at)
    if isinstance(raw, Mapping) and isinstance(kind, type) and is_dataclass(kind):
        return _filled(kind, raw, at)
    if isinstance(raw, Mapping) and origin is Mapping:
        return {key: built(parts[1], each, f"{at}.{key}") for key, each in raw.items()}
    if isinstance(raw, list) and origin in (tuple, Sequence):
        alike = origin is Sequence or parts[-1] is ...
        kinds = parts[:1] * len(raw) if alike else (*parts, *[Any] * len(raw))
        return tuple(built(each, value, f"{at}[{i}]") for i, (each, value) in enumerate(zip(kinds, raw, strict=False)))
    return raw


def _filled(kind: Any, raw: Mapping[str, Any], at: str) -> Any:
    hints, path = _hints(kind, include_extras=True), f"{at}." if at else ""
    needed = [each.name for each in fields(kind) if each.default is each.default_factory is MISSING]
    if lacking := [name for name in needed if name not in raw]:
        raise ValueError(f"{at or 'it'} lacks {lacking[0]!r}; expected {', '.join(needed)}")
    given = {name: built(hints.get(name, Any), value, f"{path}{name}") for name, value in raw.items()}
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}{error}") from error
