"""Selection by a parallel prefix sum (DRAGONN, Appendix C), with every operation counted."""

from collections import Counter
from collections.abc import Sequence


def by_prefix_sum(values: Sequence[float], threshold: float) -> tuple[list[int], Counter[str]]:
    """Return the indices of values ≥ threshold and the operations spent; the length is a power of two."""
    counts: Counter[str] = Counter()
    mask = [int(value >= threshold) for value in values]
    counts["compare"] += len(values)
    places = _exclusive_scan(mask, counts)
    ends = [*places[1:], places[-1] + mask[-1]]
    counts["compare"] += len(values)
    return [i for i, (place, end) in enumerate(zip(places, ends, strict=True)) if end > place], counts


def by_hash(values: Sequence[float], threshold: float) -> Counter[str]:
    """Return the operations that hashing spends: a comparison each, and a hash for every value that passes."""
    passed = sum(value >= threshold for value in values)
    return Counter({"compare": len(values), "hash": passed})


def _exclusive_scan(mask: list[int], counts: Counter[str]) -> list[int]:
    tree, reach = list(mask), 1
    while reach < len(tree):
        for right in range(2 * reach - 1, len(tree), 2 * reach):
            tree[right] += tree[right - reach]
            counts["add"] += 1
        reach *= 2
    tree[-1] = 0
    while reach > 1:
        reach //= 2
        for right in range(2 * reach - 1, len(tree), 2 * reach):
            tree[right - reach], tree[right] = tree[right], tree[right - reach]
            counts["swap"] += 1
            tree[right] += tree[right - reach]
            counts["add"] += 1
    return tree
