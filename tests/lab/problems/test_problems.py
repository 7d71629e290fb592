"""The bench's training problems, on small files of the layouts they read and, where there are any, on the real ones."""

import copy
import gzip
import os
import sysconfig
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from thinwire_lab.inputs import BadInput
from thinwire_lab.problems import PROBLEMS, Batch, Parts, Problem, build, text
from thinwire_lab.problems.base import sgd, share, spaced
from thinwire_lab.problems.transformer import ByteGPT, Shape, recency

NOISE = np.random.default_rng(5)
DATA = os.environ.get("THINWIRE_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="THINWIRE_DATA names no directory with cifar10, mnist, wikitext2")


@pytest.fixture(autouse=True)
def _same_noise() -> None:
    """Have each test draw the same numbers, whichever ran before it."""
    NOISE.bit_generator.state = np.random.default_rng(5).bit_generator.state


def _write_words(folder: Path) -> Path:
    for name, lines in (("train.txt", 60), ("valid.txt", 30)):
        words = NOISE.choice(["the", "lobster", "is", "blue", "<unk>"], (lines, 7))
        (folder / name).write_text("".join(" " + " ".join(line) + " \n" for line in words))
    return folder


def _idx(array: np.ndarray[Any, Any]) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def _write_digits(folder: Path) -> Path:
    for part, count in (("train", 80), ("t10k", 24)):
        labels = np.arange(count) % 10
        images = np.zeros((count, 28, 28)) + 20 * labels[:, None, None]
        (folder / f"{part}-images-idx3-ubyte").write_bytes(_idx(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(_idx(labels), mtime=0))
    return folder


def _images(count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.repeat(NOISE.integers(256, size=(count, 1, 1, 3)), 32, axis=1).repeat(32, axis=2).astype(np.uint8)


def _jpeg(image: np.ndarray[Any, Any]) -> bytes:
    stream = BytesIO()
    Image.fromarray(image).save(stream, "JPEG")
    return stream.getvalue()


def _jpeg_arrays(count: int) -> dict[str, np.ndarray[Any, Any]]:
    files = [_jpeg(image) for image in _images(count)]
    return {
        "jpeg": np.frombuffer(b"".join(files), np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "labels": np.arange(count, dtype=np.uint8) % 10,
        "split": (np.arange(count) >= count - 12).astype(np.uint8),
    }


def _save(file: Path, **arrays: Any) -> Path:
    np.savez(file, **arrays)
    return file


def _write_images(folder: Path) -> Path:
    return _save(folder / "pixels.npz", images=_images(120), labels=np.arange(120, dtype=np.uint8) % 10)


def _write_jpegs(folder: Path) -> Path:
    _save(folder / "jpegs.npz", **_jpeg_arrays(40))
    return folder


def _write_text(folder: Path) -> Path:
    (folder / "text").write_bytes(b"to be or not to be, " * 400)
    return folder / "text"


def _write_clicks(folder: Path) -> Path:
    with gzip.open(folder / "clicks.gz", "wt") as file:
        for _ in range(70):
            counts, hashes = NOISE.integers(-2, 50, 13), NOISE.integers(1 << 32, size=26)
            file.write("\t".join([str(NOISE.integers(2)), *map(str, counts), *(f"{x:08x}" for x in hashes)]) + "\n")
    return folder / "clicks.gz"


SMALL: dict[str, tuple[str, Callable[[Path], Path] | None, float]] = {
    "source": ("transformer", None, 1.0),
    "source, larger": ("transformer", None, 2.0),
    "text": ("transformer", _write_text, 1.0),
    "words": ("lstm", _write_words, 1.0),
    "words, sparse": ("lstm_sparse", _write_words, 1.0),
    "digits": ("mlp", _write_digits, 1.0),
    "images": ("resnet20", _write_images, 1.0),
    "jpegs": ("resnet20", _write_jpegs, 1.0),
    "images, dense layers": ("vgg", _write_images, 1.0),
    "documents": ("xml", None, 0.003),
    "clicks": ("dlrm", None, 1.0),
    "Criteo's clicks": ("dlrm", _write_clicks, 1.0),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=SMALL)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Problem]:
    """Every problem, as a function of the seed, on small data."""
    name, write, scale = SMALL[request.param]
    data = None if write is None else write(tmp_path)
    return lambda seed: build(name, seed=seed, data=data, scale=scale)


def _same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(mine, yours) for mine, yours in zip(one, other, strict=True))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(BadInput, match=rf"the seed is {seed}; expected 0 or more, and less than 2\^63"):
        build("transformer", seed=seed)


def test_the_seed_settles_weights_and_batches(small: Callable[[int], Problem]) -> None:
    first, second = small(3), small(3)
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    assert all(_same(first.batch(step, 1, 2), second.batch(step, 1, 2)) for step in (7, 0))
    assert all(_same(*pair) for pair in zip(first.held_out(0, 2), small(4).held_out(0, 2), strict=True))


def test_every_seed_step_rank_and_world_has_its_own_batch(small: Callable[[int], Problem]) -> None:
    problem = small(0)
    batches = [problem.batch(*key) for key in ((0, 0, 2), (0, 1, 2), (1, 0, 2), (0, 0, 1))] + [small(1).batch(0, 0, 2)]
    assert not any(_same(batches[i], batches[j]) for i in range(5) for j in range(i))


def test_held_out_shares_are_equal_and_every_batch_is_fit_to_use(small: Callable[[int], Problem]) -> None:
    problem = small(0)
    shapes = {tuple(part.shape for part in batch) for rank in range(3) for batch in problem.held_out(rank, 3)}
    assert len(shapes) == 1
    assert len({len(problem.held_out(rank, 3)) for rank in range(3)}) == 1
    *inputs, targets = problem.batch(0, 0, 1)
    assert {tensor.dtype for tensor in inputs} <= {torch.float32, torch.int64}
    assert targets.dtype == torch.int64
    assert {value.dtype for value in problem.model.parameters()} == {torch.float32}
    assert "\n" not in problem.description


def test_the_global_generators_stay_as_they_are(small: Callable[[int], Problem]) -> None:
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].tobytes()
    problem = small(11)
    problem.batch(0, 0, 1)
    problem.held_out(0, 1)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.random.get_state(legacy=False)["state"]["key"].tobytes() == numpy_state


def test_a_few_steps_lower_the_loss(small: Callable[[int], Problem]) -> None:
    problem = small(0)
    optimizer = torch.optim.SGD(problem.model.parameters(), problem.learning_rate / 2, problem.momentum)
    losses = []
    for step in range(6):
        loss = problem.loss(problem.model, problem.batch(step % 2, 0, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert loss.shape == ()
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


def test_shares_are_disjoint_and_leave_out_little() -> None:
    for count, world, size in ((144, 2, 12), (144, 5, 12), (37, 3, 8), (4, 4, 8)):
        shares = [share(spaced(count, count), rank, world, size) for rank in range(world)]
        assert len({tuple(map(len, chunks)) for chunks in shares}) == 1
        assert len({len(chunk) for chunk in shares[0]}) == 1
        assert len(shares[0][0]) <= size
        everything = np.concatenate([chunk for chunks in shares for chunk in chunks])
        assert len(set(everything.tolist())) == len(everything)
        assert len(everything) > count - world * (len(shares[0]) + 1)


def test_more_ranks_than_held_out_samples_are_refused() -> None:
    with pytest.raises(BadInput, match="use fewer workers"):
        share(spaced(3, 9), 0, 4, 8)


def test_jpegs_decode_to_what_was_packed(tmp_path: Path) -> None:
    arrays = _jpeg_arrays(40)
    problem = build("resnet20", seed=0, data=_save(tmp_path / "set.npz", **arrays))
    images, labels = problem.held_out(0, 1)[0]
    first = arrays["jpeg"][arrays["offsets"][28] : arrays["offsets"][29]].tobytes()
    pixels = torch.from_numpy(np.array(Image.open(BytesIO(first)))).permute(2, 0, 1).float()
    assert labels.tolist() == [number % 10 for number in range(28, 40)]
    assert torch.corrcoef(torch.stack([pixels.flatten(), images[0].flatten()]))[0, 1] > 0.9


def test_words_outside_the_vocabulary_are_unknown(tmp_path: Path) -> None:
    _write_words(tmp_path)
    (tmp_path / "valid.txt").rename(tmp_path / "test.txt")
    (tmp_path / "test.txt").write_text("crab " * 60)
    problem = build("lstm", seed=0, data=tmp_path)
    assert problem.held_out(0, 1)[0][0].unique().tolist() == [0]


def test_the_sparse_lstm_hands_out_rows_and_shares_no_weight(tmp_path: Path) -> None:
    problem = build("lstm_sparse", seed=0, data=_write_words(tmp_path))
    problem.loss(problem.model, problem.batch(0, 0, 1)).backward()
    gradients = {name: parameter.grad for name, parameter in problem.model.named_parameters()}
    assert {name for name, gradient in gradients.items() if gradient is not None and gradient.is_sparse} == {
        "embedding.weight"
    }
    assert "head.weight" in gradients


def test_sparse_embeddings_are_trained_without_momentum(tmp_path: Path) -> None:
    sparse, tied = (build(name, seed=0, data=_write_words(tmp_path)) for name in ("lstm_sparse", "lstm"))
    rest, rows = sgd(sparse.model, sparse).param_groups
    assert rows["params"] == [sparse.model.get_parameter("embedding.weight")]
    assert (rest["momentum"], rows["momentum"]) == (sparse.momentum, 0)
    assert len(rest["params"]) == len(list(sparse.model.parameters())) - 1
    assert [group["momentum"] for group in sgd(tied.model, tied).param_groups] == [tied.momentum]


FALLING = [name for name, (model, *_) in SMALL.items() if model in ("transformer", "mlp", "dlrm")]


def _parts(problem: Problem) -> Parts:
    assert problem.parts is not None
    return problem.parts


def _through(stages: list[nn.Module], batch: Batch, parts: Parts) -> list[Tensor]:
    """What every stage puts out."""
    (x,), named, _ = parts.feed(batch)
    # A keyword argument that no stage knows: each has to ignore what only others need.
    return [x := stage(x, **named, unknown=torch.ones(3)) for stage in stages]


def _gradients(problem: Problem) -> dict[str, Tensor]:
    found = {name: value.grad for name, value in problem.model.named_parameters() if value.grad is not None}
    assert len(found) == len(list(problem.model.parameters()))
    assert all(gradient.count_nonzero() for gradient in found.values())
    return found


def _moved(problem: Problem) -> Problem:
    """The same away from the initial state, where some weights are zero and so are gradients behind them."""
    generator = torch.Generator().manual_seed(1)
    for value in problem.model.parameters():
        value.data += 0.02 * torch.randn(value.shape, generator=generator)
    return problem


@pytest.mark.parametrize("small", FALLING, indirect=True)
@pytest.mark.parametrize("count", [2, 3])
def test_stages_compute_what_the_model_computes(small: Callable[[int], Problem], count: int) -> None:
    problem, split = _moved(small(0)), _moved(small(0))
    parts, batch = _parts(split), split.batch(0, 0, 1)
    arguments, named, target = parts.feed(batch)
    output = _through(parts.split(split.model, count), batch, parts)[-1]
    assert torch.equal(output, problem.model(*arguments, **named))
    loss, expected = parts.criterion(output, target), problem.loss(problem.model, batch)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    gradients = _gradients(split)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in _gradients(problem).items())


@pytest.mark.parametrize("small", FALLING, indirect=True)
@pytest.mark.parametrize("count", [2, 3])
def test_stages_share_the_parameters_of_the_model_or_its_copy(small: Callable[[int], Problem], count: int) -> None:
    problem = small(0)
    for model in (problem.model, copy.deepcopy(problem.model)):
        stages = _parts(problem).split(model, count)
        assert len(stages) == count
        held = [id(value) for stage in stages for value in stage.parameters()]
        assert sorted(held) == sorted(id(value) for value in model.parameters())


@pytest.mark.parametrize(
    ("small", "shape", "positive"),
    [("source", (12, 64, 176), False), ("digits", (64, 1024), True), ("clicks", (128, 256), True)],
    indirect=["small"],
)
def test_models_are_cut_where_little_crosses(
    small: Callable[[int], Problem], shape: tuple[int, ...], positive: bool
) -> None:
    problem = small(0)
    parts = _parts(problem)
    for count in (2, 3):
        *crossing, _ = _through(parts.split(problem.model, count), problem.batch(0, 0, 1), parts)
        assert [tuple(tensor.shape) for tensor in crossing] == [shape] * (count - 1)
        assert all(bool((tensor >= 0).all()) == positive for tensor in crossing)


@pytest.mark.parametrize("small", FALLING, indirect=True)
@pytest.mark.parametrize("count", [-1, 0, 1, 4])
def test_other_numbers_of_stages_are_refused(small: Callable[[int], Problem], count: int) -> None:
    problem = small(0)
    with pytest.raises(BadInput, match=f"2 or 3 stages, not {count}"):
        _parts(problem).split(problem.model, count)


def test_the_summaries_count_the_parameters_right(tmp_path: Path) -> None:
    problem = build("transformer", seed=0)
    assert sum(value.numel() for value in problem.model.parameters()) == pytest.approx(0.83e6, abs=5e3)
    problem = build("resnet20", seed=0, data=_write_images(tmp_path))
    assert sum(value.numel() for value in problem.model.parameters()) == 269_722
    problem = build("dlrm", seed=0)
    assert sum(value.numel() for value in problem.model.parameters()) == pytest.approx(1.0e6, abs=5e4)
    problem = build("dlrm", seed=0, data=_write_clicks(tmp_path))
    assert sum(value.numel() for value in problem.model.parameters()) == pytest.approx(4.7e6, abs=5e4)
    assert sum(value.numel() for value in build("xml", seed=0, scale=0.1).model.parameters()) == 4096 * 3094


def test_a_scale_multiplies_the_parameters_of_the_transformer() -> None:
    assert Shape.of(1) == Shape(context=64, width=176, heads=4, layers=2)
    slopes = -recency(2, 4, torch.device("cpu"))[:, 1, 0]
    assert slopes.tolist() == [2, 1, 0.5, 0.25]
    for scale in (0.16, 3, 9, 12, 50, 150, 1000):
        with torch.device("meta"):
            count = sum(p.numel() for p in ByteGPT(Shape.of(scale)).parameters())
        assert count == pytest.approx(scale * 834_416, rel=0.1)
    assert [Shape.of(scale).context for scale in (9, 150)] == [96, 512]


def _refusal(name: str, data: Path | None = None, *, seed: int = 0, scale: float = 1.0) -> str:
    with pytest.raises(BadInput) as caught:
        build(name, seed=seed, data=data, scale=scale).batch(0, 0, 1)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    assert all(name in _refusal("alexnet") for name in PROBLEMS)
    assert "seed" in _refusal("transformer", seed=-1)
    assert "one size" in _refusal("dlrm", scale=0.5)
    assert "leave --data out" in _refusal("xml", tmp_path)
    for scale in (0.0, -1.0, float("nan"), float("inf"), 1e300):
        assert f"--scale is {scale:g}; expected above 0 and at most 10,000" in _refusal("xml", scale=scale)
    assert "--scale is 1e+300; expected above 0 and at most 1,000,000" in _refusal("transformer", scale=1e300)


@pytest.mark.parametrize("name", ["lstm", "lstm_sparse", "mlp", "resnet20", "vgg"])
def test_missing_data_is_refused(name: str, tmp_path: Path) -> None:
    assert "--data" in _refusal(name)
    assert "expected" in _refusal(name, tmp_path)
    assert "expected" in _refusal(name, tmp_path / "nothing")


def test_unusable_texts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("short")
    for name in ("nothing", "", "empty", "short"):
        assert str(tmp_path) in _refusal("transformer", tmp_path / name)
    assert "UTF-8" in _refusal("lstm", tmp_path)
    (tmp_path / "train.txt").write_text("a b c")
    (tmp_path / "valid.txt").write_text("a b c")
    assert "too short" in _refusal("lstm", tmp_path)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert "--data" in _refusal("transformer")


def test_sources_that_cannot_be_read_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    for number in range(40):
        (tmp_path / f"{number:02}.py").write_text(f"value = {number:03}\n")
    (tmp_path / "05.py").unlink()
    (tmp_path / "05.py").symlink_to(tmp_path / "nothing")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "not.py").write_text("no")
    train, rest = text.source_texts()
    assert rest.tobytes() == b"value = 019\nvalue = 039\n"
    assert len(train) == 37 * 12


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train-images-idx3-ubyte", _idx(np.zeros((80, 28, 28)))[:-1]),
        ("train-images-idx3-ubyte", _idx(np.zeros((79, 28, 28)))),
        ("train-images-idx3-ubyte", b"\0\0\x08"),
        ("train-images-idx3-ubyte", b"no idx file at all, this"),
        ("train-labels-idx1-ubyte.gz", gzip.compress(_idx(np.zeros(80)), mtime=0)[:-9]),
        ("train-labels-idx1-ubyte.gz", b"not gzip"),
        ("t10k-labels-idx1-ubyte.gz", gzip.compress(_idx(np.full(24, 10)), mtime=0)),
    ],
)
def test_broken_idx_files_are_refused(name: str, content: bytes, tmp_path: Path) -> None:
    (_write_digits(tmp_path) / name).write_bytes(content)
    assert "expected" in _refusal("mlp", tmp_path)


def _broken_archives() -> dict[str, dict[str, Any]]:
    images, jpegs = {"images": _images(20), "labels": np.zeros(20, np.uint8)}, _jpeg_arrays(40)
    return {
        "no keys": {"pixels": images["images"]},
        "no labels": {"images": images["images"]},
        "wrong type": images | {"images": images["images"].astype(np.float32)},
        "wrong shape": images | {"images": images["images"][:, :31]},
        "wrong labels": images | {"labels": np.full(20, 10)},
        "pickled": images | {"labels": np.array([None] * 20)},
        "too few": {key: value[:9] for key, value in images.items()},
        "no split": {key: value for key, value in jpegs.items() if key != "split"},
        "short offsets": jpegs | {"offsets": jpegs["offsets"][:-1]},
        "no JPEG": jpegs | {"jpeg": np.zeros_like(jpegs["jpeg"])},
    }


@pytest.mark.parametrize("kind", _broken_archives())
def test_broken_archives_are_refused(kind: str, tmp_path: Path) -> None:
    assert "expected" in _refusal("resnet20", _save(tmp_path / "set.npz", **_broken_archives()[kind]))


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    file = _write_images(tmp_path)
    raw = bytearray(file.read_bytes())
    raw[200_000:200_100] = bytes(100)
    file.write_bytes(raw)
    assert "expected" in _refusal("resnet20", file)


@needs_data
@pytest.mark.parametrize(
    ("name", "folder", "parameters", "chance"),
    [
        ("lstm", "wikitext2", 4_424_958, 33_278),
        ("lstm_sparse", "wikitext2", 8_684_542, 33_278),
        ("mlp", "mnist", 1_863_690, 10),
        ("resnet20", "cifar10", 269_722, 10),
        ("vgg", "cifar10", 1_603_226, 10),
    ],
)
def test_real_data_gives_problems_of_the_known_size(name: str, folder: str, parameters: int, chance: int) -> None:
    problem = build(name, seed=0, data=Path(DATA or "", folder))
    assert sum(value.numel() for value in problem.model.parameters()) == parameters
    inputs, targets = problem.batch(0, 0, 2)
    assert 0 < len(targets.unique()) <= targets.numel()
    assert len(problem.held_out(0, 2)) * 2 * len(inputs) >= 96
    assert problem.loss(problem.model, (inputs, targets)).item() == pytest.approx(np.log(chance), rel=0.6)
