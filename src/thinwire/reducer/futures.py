"""Joining futures."""

from collections.abc import Sequence

from torch.futures import Future, collect_all


def completed(finite: bool) -> "Future[bool]":
    """Return a future that is done."""
    future: Future[bool] = Future()
    future.set_result(finite)
    return future


def all_true(futures: "Sequence[Future[bool]]") -> "Future[bool]":
    """Return a future for whether all hold True; it raises what any of them raised."""
    if len(futures) == 1:
        return futures[0]
    return collect_all(list(futures)).then(lambda done: all(future.value() for future in done.value()))
