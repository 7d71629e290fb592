"""Runs every case at every place, and returns rows."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median

import torch

from thinwire.kernels.dispatch import backend_of
from thinwire_lab.bench.rows import percentiles
from thinwire_lab.studies.kernels.adding import CASES as ADDING
from thinwire_lab.studies.kernels.chunking import CASES as CHUNKING
from thinwire_lab.studies.kernels.coding import CASES as CODING
from thinwire_lab.studies.kernels.material import Material
from thinwire_lab.studies.kernels.quantising import CASES as QUANTISING
from thinwire_lab.studies.kernels.rows import Row
from thinwire_lab.studies.kernels.scattering import CASES as SCATTERING
from thinwire_lab.studies.kernels.selecting import CASES as SELECTING
from thinwire_lab.studies.kernels.steps import CASES as STEPS
from thinwire_lab.studies.kernels.timing import Times, baseline, clock, interleave
from thinwire_lab.studies.kernels.travelling import CASES as TRAVELLING
from thinwire_lab.studies.kernels.work import Case, Place, Work

CASES: dict[str, Case] = {
    **STEPS,
    **TRAVELLING,
    **SELECTING,
    **SCATTERING,
    **CODING,
    **QUANTISING,
    **CHUNKING,
    **ADDING,
}
TARGET_DENSITY = 1e-3
_CHECKED = 1 << 22  # above this, only rows with a target are checked against the reference at their own size
_MOST_PICKS = 1 << 26  # of all workers together
_BUDGET, _REFERENCE_BUDGET, _TARGET_BUDGET = 1.0, 3.0, 20.0  # seconds that a torch expression may take

Verdict = tuple[bool, str | None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the user asked for."""

    names: Sequence[str]
    sizes: Sequence[int]
    densities: Sequence[float]
    workers: Sequence[int]
    device: torch.device
    repeats: int
    budget: float

    @property
    def typical(self) -> float:
        """The density nearest to that of the targets."""
        return min(self.densities, key=lambda density: abs(density - TARGET_DENSITY))

    def places(self, material: Material) -> Iterator[tuple[str, Place]]:
        """Return all rows to measure, small sizes first: densities at most workers, workers at one density."""
        for numel in sorted(self.sizes):
            for name in self.names:
                for density, workers in self._sweep(CASES[name], numel):
                    yield name, Place(material=material, numel=numel, density=density, workers=workers)

    def _sweep(self, case: Case, numel: int) -> list[tuple[float, int]]:
        typical, most = self.typical, max(self.workers) if case.workers else 2
        pairs = [(density, most) for density in (self.densities if case.sweep else [case.density or typical])]
        if case.workers:
            pairs += [(typical, count) for count in self.workers if count != most]
        return [pair for pair in pairs if pair[0] * pair[1] * numel <= _MOST_PICKS]


@dataclass
class Runner:
    """Measures places one after another. Remembers what was checked, and how long torch took."""

    plan: Plan
    _checked: dict[tuple[str, int, float, int], Verdict] = field(default_factory=dict, init=False)
    _pace: dict[tuple[str, str, float], float] = field(default_factory=dict, init=False)

    def rows(self, tell: Callable[[str], None]) -> Iterator[Row]:
        """Measure everything."""
        material = Material(max(self.plan.sizes), self.plan.device)
        for name, place in self.plan.places(material):
            tell(f"{name}, {place.numel:,} elements")
            yield self._row(name, CASES[name], place)

    def _row(self, name: str, case: Case, place: Place) -> Row:
        numel = self._check_size(case, place)
        right, why = self._verdict(name, case, replace(place, numel=numel))
        row = Row(
            name=name,
            group=case.group,
            backend=_backend(place),
            d=place.numel,
            density=place.density if case.sweep or case.density else None,
            workers=place.workers if case.workers else None,
            correct=right,
            checked_at=numel,
            floor=case.floor,
            baseline=case.baseline,
            why=why,
        )
        try:
            return self._timed(row, case.make(place), place) if right else row
        except Exception as error:  # the other rows are still worth having
            return replace(row, correct=False, why=_told(error))

    def _verdict(self, name: str, case: Case, place: Place) -> Verdict:
        """Check the backend against the reference, once per place. If it raises, it is not correct either."""
        key = (name, place.numel, place.density, place.workers)
        if key not in self._checked:
            try:
                right = case.make(place).agrees()
                self._checked[key] = (right, None if right else "differs from the reference")
            except Exception as error:
                self._checked[key] = (False, _told(error))
        return self._checked[key]

    def _timed(self, row: Row, work: Work, place: Place) -> Row:
        measure = clock(place.device)
        times = interleave(work, measure, repeats=self.plan.repeats, budget=self.plan.budget)
        ratios = self._ratios(row.name, work, place, times)
        return replace(
            row,
            seconds=asdict(percentiles(times.ours)),
            floor_seconds=median(times.floor),
            ratio_to_floor=times.ratio,
            ratio_to_torch=ratios.get("torch"),
            ratio_to_mask=ratios.get("mask"),
            bytes_moved=work.moved,
            bits_per_kept=work.bits,
            repeats=len(times.ours),
        )

    def _ratios(self, name: str, work: Work, place: Place, times: Times) -> Mapping[str, float]:
        """Time the torch expressions, except those that, judging by a smaller size, would take too long."""
        found = {}
        for other, call in work.baselines().items():
            key = (name, other, place.density)
            expected = self._pace.get(key, 0.0) * place.numel if place.numel > _CHECKED else 0.0
            if expected <= self._budget(name, work, place):
                spend = _BUDGET if self._is_typical(CASES[name], place) else 0.0
                seconds = baseline(call, clock(place.device), spend)
                self._pace[key] = min(seconds / place.numel, self._pace.get(key, math.inf))
                found[other] = seconds / median(times.ours)
        return found

    def _budget(self, name: str, work: Work, place: Place) -> float:
        if not self._is_typical(CASES[name], place):
            return _BUDGET
        return _TARGET_BUDGET if work.others else _REFERENCE_BUDGET

    def _is_typical(self, case: Case, place: Place) -> bool:
        """Whether a target is about this place."""
        most = not case.workers or place.workers == max(self.plan.workers)
        return most and (not case.sweep or place.density == self.plan.typical)

    def _check_size(self, case: Case, place: Place) -> int:
        numel = min(place.numel, case.most or place.numel)
        return numel if self._is_typical(case, place) else min(numel, _CHECKED)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _backend(place: Place) -> str:
    return backend_of([place.gradient()])
