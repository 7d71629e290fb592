"""The page of a proof, from its JSON: Markdown, with the tables of docs/measurements/gpu.md."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from thinwire_lab.check.gpu import cost, steps

Row = Mapping[str, Any]
INTERPRETER = "Triton's interpreter"
"""Where there is no GPU. What a CPU takes tells nothing of one."""
NONE = "\N{EN DASH}"
_LARGEST = 100_000_000  # elements: a bucket of more is the large one


def page_of(document: Row) -> str:
    """Return the page."""
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    parts = [f"# GPU: {document['device']}", versions + ".", "## What failed", *_failed(document)]
    for title, table in tables(document).items():
        parts += [f"## {title}", table]
    return "\n\n".join(parts) + "\n"


def tables(document: Row) -> dict[str, str]:
    """Return the tables by title, without those of which nothing has been measured."""
    found = document["parts"]
    each = [row for row in found.get("buckets", {}).values() if "launches" in row]
    made = {
        "What was checked": [_part(name, found[name], document["seconds"]) for name in found],
        "A bucket of 25 MiB": list(_buckets(each)),
        "First steps": [_first(row) for row in _rows(found, "first")],
        "Memory": [_held(name, row) for name, row in found.get("held", {}).items() if "allocated_bytes" in row],
        "Kernels beside their floors": list(_kernels(_listed(found, "kernels"))),
        "A training step": _steps(_listed(found, "steps") if document["device"] != INTERPRETER else ()),
        "What would a step take elsewhere?": list(_predicted(document.get("model", ()))),
    }
    made |= {f"Two ranks, {link}": _steps(row.get("rows", ())) for link, row in found.get("network", {}).items()}
    return {title: _table(rows) for title, rows in made.items() if rows}


def _failed(document: Row) -> Iterator[str]:
    each = [(part, key, row) for part, found in document["parts"].items() for key, row in found.items()]
    lines = [f"- {part}, {key}: {row['error']}" for part, key, row in each if "error" in row]
    lines += [f"- Not run: {part}, {key}: {row['left_out']}." for part, key, row in each if "left_out" in row]
    yield "\n".join(lines) or "Nothing."


def _part(name: str, rows: Mapping[str, Row], seconds: Mapping[str, float]) -> dict[str, str]:
    failed = sum("error" in row for row in rows.values())
    return {"part": f"`{name}`", "cases": str(len(rows)), "failed": str(failed), "s": f"{seconds.get(name, 0):.0f}"}


def _buckets(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for name in dict.fromkeys(row["recipe"] for row in rows):
        six, many, large = ([row for row in rows if row["recipe"] == name and _kind(row) == kind] for kind in _KINDS)
        if not six or not many:
            continue
        found = {"recipe": f"`{name}`", "kernels: six tensors": _count(six[0]), "a hundred": _count(many[0])}
        if "host_us" in six[0]:
            for row, title in ((six[0], "six"), (many[0], "a hundred")):
                found |= {f"one by one: {title}": f"{1e-3 * row['host_us']['all']:.1f}"}
                captured = 1e-3 * row["captured"]["host_us"]["all"]
                found |= {f"captured: {title}": f"{captured:.1f}" if _launches(row) > cost.FEW else NONE}
            found |= {"busy ms: six": f"{_busy(six[0]):.2f}", "busy ms: a hundred": f"{_busy(many[0]):.2f}"}
            found["500 MB in one"] = f"{_busy(large[0]):.1f}" if large else NONE
        yield found


_KINDS = ("six", "a hundred", "large")


def _kind(row: Row) -> str:
    if row["elements"] > _LARGEST:
        return "large"
    return {(6, "float32"): "six", (100, "bfloat16"): "a hundred"}.get((row["tensors"], row["dtype"]), "")


def _launches(row: Row) -> int:
    return sum(row["launches"].values())


def _count(row: Row) -> str:
    return str(_launches(row))


def _busy(row: Row) -> float:
    return sum(row["busy_ms"].values())


def _first(row: Row) -> dict[str, str]:
    found = {"recipe": f"`{row['recipe']}`", "prepare s": f"{row['prepare_s']:.1f}"}
    return found | {f"step {number}": f"{seconds:.2g}" for number, seconds in enumerate(row["steps_s"], 1)}


def _held(name: str, row: Row) -> dict[str, str]:
    """Return what was held after the last step, in MB, and what is reserved for each stream."""
    reserved = row.get("reserved_bytes", [0])
    streams = ", ".join(f"{nbytes / 1e6:.0f}" for nbytes in row["streams"]) or NONE
    held = {"allocated MB": f"{row['allocated_bytes'][-1] / 1e6:.1f}", "reserved": f"{reserved[-1] / 1e6:.1f}"}
    return {"bucket": name} | held | {"by stream": streams}


def _kernels(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    chosen = [row for row in rows if row.get("seconds") and row["name"].startswith(("encode", "decode of"))]
    for name, each in groupby(sorted(chosen, key=lambda row: str(row["name"])), lambda row: str(row["name"])):
        found = {"kernel": name}
        for row in sorted(each, key=lambda row: int(row["elements"])):
            size = f"{row['elements'] * 4 / 1e6:.0f} MB"
            found |= {f"{size}: ms": f"{1e3 * row['seconds']['p50']:.2f}", f"{size}: over its floor": _over(row)}
        yield found


def _over(row: Row) -> str:
    return f"{row['over_copy']:.2g}" if row.get("over_copy") else NONE


def _steps(rows: Sequence[Row]) -> list[dict[str, str]]:
    found = dict[int, dict[str, str]]()
    for row in rows:
        plain = row["name"] in (steps.PLAIN, steps.HOOK)
        name = f"{row['name']}, AdamW" if plain and row["optimizer"] == "AdamW" else row["name"]
        title = name if plain else f"`{name}`"
        line = found.setdefault(row["tokens"], {"tokens": f"{row['tokens']:,}"})
        line[title] = f"{row['ms']:.0f}" if "ms" in row else NONE
    return list(found.values())


def _predicted(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield a row for each recipe: for each model the milliseconds on each link, the last standing for faster ones."""
    for name in dict.fromkeys(row["recipe"] for row in rows):
        found = {"recipe": f"`{name}`"}
        for row in [row for row in rows if row["recipe"] == name]:
            each = [f"{row[link]:,.0f}" for link in cost.LINKS]
            while len(each) > 1 and each[-1] == each[-2]:
                each.pop()
            found[row["model"]] = "/".join(each)
        yield found


def _rows(found: Mapping[str, Mapping[str, Row]], part: str) -> list[Row]:
    return [row for row in found.get(part, {}).values() if "error" not in row]


def _listed(found: Mapping[str, Mapping[str, Row]], part: str) -> list[Row]:
    return [row for rows in found.get(part, {}).values() for row in rows.get("rows", ())]


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as Markdown, whose first column names them; where a row has nothing, a dash."""
    headings = list(dict.fromkeys(name for row in rows for name in row))
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    lines += [[row.get(name, NONE) for name in headings] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
