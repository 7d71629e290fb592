"""The sketch, its error, and the residual."""

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.codecs import BlockTopK, Cast, CountSketch, RandomK
from thinwire.payloads import Sketch
from thinwire.signals import Plain
from thinwire_lab.papers.shared.claims import S2, Finding
from thinwire_lab.papers.shared.errors import packed_rows
from thinwire_lab.papers.shared.material import Material, error

SHARE, BLOCK = 1 / 32, 32


def _noise(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@S2.claim("S1")
def summable(material: Material) -> Finding:
    worst, unequal = 0.0, []
    for p in range(2, 9):
        parts = [_noise(3000, 10 * p + rank) for rank in range(p)]
        total = CountSketch().encode(torch.stack(parts).sum(dim=0), seed=p).values
        alike = Sketch.concat([CountSketch().encode_signal(Plain(x), seed=p) for x in parts]).values
        apart = torch.stack([CountSketch().encode(x, seed=rank).values for rank, x in enumerate(parts)]).sum(dim=0)
        worst = max(worst, error(total, alike))
        unequal.append(error(total, apart))
    figure = f"err2 at most {worst:.0e} with equal seeds, at least {min(unequal):.2f} with unequal ones"
    return Finding(holds=worst < 1e-12, figure=figure)


@S2.claim("S2")
def zeros(material: Material) -> Finding:
    x = torch.where(_noise(2000, 0).abs() > 1.5, _noise(2000, 1), 0.0)
    full = kernels.sketch_insert.cpu(x, 3, 100, 7)
    without = torch.zeros_like(full)
    for i in x.nonzero().view(-1).tolist():
        alone = torch.zeros_like(x)
        alone[i] = x[i]
        without += kernels.sketch_insert.cpu(alone, 3, 100, 7)
    same = torch.equal(full, without)
    figure = f"bit-equal: {'yes' if same else 'no'}, with {int((x == 0).sum())} of {x.numel()} elements zero"
    return Finding(holds=same, figure=figure)


@S2.claim("S3")
def unbiased(material: Material) -> Finding:
    x, seeds = _noise(200, 3) + 1, material.many(300, 2000)
    deviations = {rows: _deviation(x, [_query(x, rows, seed) for seed in range(seeds)]) for rows in (1, 2, 3, 4, 5)}
    pairs = [torch.stack([_query(x, 1, 2 * s, ratio=0.25), _query(x, 1, 2 * s + 1, ratio=0.25)]) for s in range(seeds)]
    lower = torch.stack([pair.median(dim=0).values for pair in pairs]).mean(dim=0)
    bias = float((lower - x).mean() / x.abs().mean())
    fixed = error(x, _query(x, 3, 0))
    listed = ", ".join(f"{value:.2f} (r = {rows})" for rows, value in deviations.items())
    figure = (
        f"mean over seeds off by {listed} standard errors; torch.median at r = 2: {bias:+.2f} of the mean magnitude"
    )
    return Finding(holds=max(deviations.values()) < 1.2, figure=figure, said={"seeds": seeds, "fixed": fixed})


def _query(x: Tensor, rows: int, seed: int, ratio: float = 0.5) -> Tensor:
    return CountSketch(rows=rows, ratio=ratio).encode(x, seed=seed).dense()


def _deviation(x: Tensor, estimates: list[Tensor]) -> float:
    found = torch.stack(estimates).double()
    standard = found.std(dim=0) / len(estimates) ** 0.5
    return float((((found.mean(dim=0) - x) / standard) ** 2).mean().sqrt())


@S2.claim("S5")
def approximate(material: Material) -> Finding:
    x, lambdas = _noise(1 << 16, 5), (4.0, 2.0, 1.0, 0.5, 0.25, 0.1)
    found = {ratio: _sketched(x, ratio, material.many(3, 10)) for ratio in lambdas}
    alone = error(x, BlockTopK(density=SHARE, block=BLOCK).encode(x).dense())
    figure = ", ".join(f"{value:.3f} at {ratio:g}" for ratio, value in found.items())
    figure = f"err2 against the claimed {1 - SHARE:.3f}: {figure} of the non-zeros; {alone:.3f} without a sketch"
    return Finding(holds=max(found.values()) <= 1 - SHARE, figure=figure)


def _sketched(x: Tensor, ratio: float, seeds: int) -> float:
    select, sketch = BlockTopK(density=SHARE, block=BLOCK), CountSketch(rows=1, ratio=ratio)
    return sum(error(x, packed_rows(x, select, sketch, seed)[0]) for seed in range(seeds)) / seeds


@S2.claim("S6")
def memory(material: Material) -> Finding:
    norms = {
        "all of g - U": _grow(True, 1.0),
        "unsent blocks only": _grow(False, 1.0),
        "a shrunk U": _grow(True, 1 / 3),
    }
    figure = ", ".join(f"{name}: {start:.0f} to {end:.2g}" for name, (start, end) in norms.items())
    start, end = norms["all of g - U"]
    return Finding(holds=end < 100 * start, figure=figure)


def _grow(sketch_errors: bool, shrink: float) -> tuple[float, float]:
    select, sketch = BlockTopK(density=SHARE, block=BLOCK), CountSketch(rows=1, ratio=0.5)
    waiting, norms = torch.zeros(1 << 14), []
    for step in range(60):
        x = waiting + _noise(1 << 14, 100 + step)
        sketched = shrink * packed_rows(x, select, sketch, step)[0]
        waiting = x - (sketched if sketch_errors else select.encode(x).dense())
        norms.append(float(waiting.norm()))
    return norms[0], norms[-1]


@S2.claim("S7")
def untouched(material: Material) -> Finding:
    problem = material.run("lstm").problem
    assert problem is not None
    words = next(p.shape[0] for name, p in problem.model.named_parameters() if "embedding" in name)
    touched = [problem.batch(step, rank, 16)[0].unique() for step in range(material.many(2, 10)) for rank in range(16)]
    one = 1 - sum(len(t) for t in touched) / len(touched) / words
    union = {p: 1 - len(torch.cat(touched[:p]).unique()) / words for p in (4, 8, 16)}
    figure = f"{one:.2%} per worker; of the union {', '.join(f'{share:.1%} at P = {p}' for p, share in union.items())}"
    return Finding(holds=one >= 0.95, figure=figure, said={"words": words, "distinct": touched[0].numel()})


@S2.claim("S16")
def best_size(material: Material) -> Finding:
    rows = [_equal_bytes(x) for _, x in material.tensors(least=32 * 256)] or [_equal_bytes(_noise(1 << 16, 0))]
    sketch, half, union = (sum(row[place] for row in rows) / len(rows) for place in range(3))
    figure = f"err2 {sketch:.2f}, a random half {half:.2f}, the union in bf16 {union:.0e}, at equal bytes"
    return Finding(holds=sketch < min(half, union), figure=figure, said={"gradients": len(rows)})


def _equal_bytes(x: Tensor) -> tuple[float, float, float]:
    packed = BlockTopK(density=SHARE).encode(x).values
    ways = (CountSketch(rows=1, ratio=0.5), RandomK(density=0.5, unbiased=True), Cast(values=torch.bfloat16))
    sketch, half, union = (error(packed, way.encode(packed, seed=3).dense()) for way in ways)
    return sketch, half, union
