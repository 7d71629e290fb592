"""Is a bucket that is replayed the bucket that would have been reduced? Captures are imitated in main memory."""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from threading import Barrier, Event
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from imitation import Imitation, _Listed, imitating
from torch import Tensor
from walk import ROOT

from thinwire.codecs import Cast, Codec, TopK
from thinwire.exchanges import all_gather
from thinwire.formats import Sign
from thinwire.kernels import replay
from thinwire.kernels.memory import constant, sent_anew
from thinwire.kernels.replay import Changing, Recording, Replays, _recorded, changing, fixed, lasting
from thinwire.memories import ErrorFeedback, Memory, NoMemory
from thinwire.reducer import Compressed, WarmUp
from thinwire.schedules import FollowLearningRate
from thinwire_lab.check.gpu import buckets
from thinwire_lab.check.gpu.buckets import RECIPES, WORLD, Case, Work, made
from thinwire_lab.check.gpu.counting import fake_group, gpu_path, patched
from thinwire_lab.check.gpu.late import LateGroup, check_freed, check_late

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
CPU = torch.device("cpu")
NOTED = ("dct_dp", "dct_steered")  # whose notes the host reads and writes
DRAWN = ("randomk", "mstopk")  # whose seeds only torch's operators read
FALLING = FollowLearningRate(learning_rate=lambda step: 0.5 if step < 8 else 0.25, smoothness=1.0)
NEVER = {"dense", "bf16", *NOTED}  # the first two are all-reduced, in a launch or two


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    yield fake_group(WORLD)
    dist.destroy_process_group()


@contextmanager
def collector_off() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _cases(*often: tuple[str, int]) -> pytest.MarkDecorator:
    """Return the cases: a launch takes Triton's interpreter a millisecond, so only these are not slow."""
    cases = [(name, tensors) for name in (*RECIPES, *DRAWN, *NOTED) for tensors in (1, 3)]
    marked = [pytest.param(*case, marks=() if case in often else pytest.mark.slow) for case in cases]
    return pytest.mark.parametrize(("name", "tensors"), marked)


@pytest.mark.usefixtures("group")
@_cases(("signsgd", 1), ("bf16", 3), ("randomk", 3))
def test_a_replayed_bucket_is_the_one_that_would_have_been_reduced(name: str, tensors: int) -> None:
    case = Case(recipe=name, tensors=tensors, dtype="float32", numel=tensors * 1088)
    with gpu_path(), imitating():
        plain, replayed = Work(case, CPU), Work(case, CPU)
        replayed.gradients = plain.gradients
        before = Imitation.replays
        for _ in range(13):  # two sets of buffers, each captured at its third use, and then what decodes them
            plain.gradients.normal_()
            for work in (plain, replayed):
                work.prepare()
            with patched((replay, "LANES", {})):
                plain.step()
            replayed.step()
            assert torch.equal(plain.flat, replayed.flat)
        for one, other in zip(plain.recipe.memories(), replayed.recipe.memories(), strict=True):
            torch.testing.assert_close(one.state(), other.state(), rtol=0, atol=0)
        assert (Imitation.replays > before) == (name not in NEVER)


@pytest.mark.usefixtures("group")
@_cases(("qsgd", 1))
def test_a_bucket_on_its_way_is_left_alone_by_another_ones_replay(name: str, tensors: int) -> None:
    with gpu_path(), imitating():
        check_late(Case(recipe=name, tensors=tensors, dtype="float32", numel=tensors * 1088), CPU)


@pytest.mark.usefixtures("group")
@pytest.mark.slow
def test_a_bucket_is_replayed_alike_while_other_graphs_come_and_go() -> None:
    with gpu_path(), imitating():
        check_freed(Case(recipe="qsgd", tensors=1, dtype="float32", numel=1088), CPU, steps=12)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("recipe", ["signsgd", pytest.param("topk", marks=pytest.mark.slow)])
def test_a_step_that_is_called_off_is_replayed_alike(recipe: str) -> None:
    case = Case(recipe=recipe, tensors=1, dtype="float32", numel=1088)
    with gpu_path(), imitating():
        plain, replayed = Work(case, CPU), Work(case, CPU)
        replayed.gradients = plain.gradients
        for step in range(16):
            plain.gradients.normal_()
            for work in (plain, replayed):
                work.prepare()
                with patched((replay, "LANES", {})) if work is plain else nullcontext():
                    work.start().wait()
                for memory in work.recipe.memories():
                    (memory.rollback if step % 4 == 3 else memory.commit)()
                work.count += 1
            assert torch.equal(plain.flat, replayed.flat)
        assert any(memory.state() for memory in replayed.recipe.memories())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("memory", "codec", "later"), [(NoMemory, Cast(values=Sign()), 8), (ErrorFeedback, TopK(density=FALLING), WORLD)]
)
def test_what_changes_after_many_steps_is_replayed_no_more(
    memory: Callable[[], Memory], codec: Codec, later: int
) -> None:
    """A scale (ranks left, or came), and a density (the rate fell)."""
    with gpu_path(), imitating():
        plain, replayed = (Work(Case(recipe="topk", tensors=1, dtype="float32", numel=1088), CPU) for _ in "ab")
        replayed.gradients = plain.gradients
        plain.recipe, replayed.recipe = (Compressed(memory=memory(), codec=codec) for _ in "ab")
        before = Imitation.replays
        for step in range(14):
            plain.gradients.normal_()
            for work in (plain, replayed):
                work.prepare()
                lanes: dict[str, Any] = {} if work is plain else replay.LANES
                with patched((buckets, "WORLD", later if step >= 8 else WORLD), (replay, "LANES", lanes)):
                    work.step()
            assert torch.equal(plain.flat, replayed.flat)
            assert step != 7 or Imitation.replays > before


@pytest.mark.usefixtures("group")
def test_what_other_ranks_sent_is_decoded_anew() -> None:
    """Fewer ranks' payloads may lie where those of more lay, and be scaled as those were."""
    case, memory = Case(recipe="qsgd", tensors=1, dtype="float32", numel=1088), torch.empty(1 << 16, dtype=torch.uint8)
    with gpu_path(), imitating(), patched((all_gather, "room", lambda nbytes, _: memory[:nbytes])):
        plain, replayed = Work(case, CPU), Work(case, CPU)
        replayed.gradients = plain.gradients
        before = Imitation.replays
        for world in [4] * 7 + [2] * 7:
            plain.group, replayed.group = LateGroup(CPU, world), LateGroup(CPU, world)
            for work in (plain, replayed):
                work.prepare()
                with patched((replay, "LANES", {})) if work is plain else nullcontext():
                    future = work.start()
                    work.group.arrive(future)
                    future.wait()
                work.end()
            assert torch.equal(plain.flat, replayed.flat)
        assert Imitation.replays > before


@pytest.mark.usefixtures("group")
@pytest.mark.first(1)
@pytest.mark.parametrize(("recipe", "most"), [("qsgd", 95), ("topk", 94), ("dgc", 120), ("fading", 116)])
def test_a_captured_bucket_takes_a_few_calls_of_the_host(
    recipe: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Counter[str]()

    def count(frame: FrameType, event: str, _: Any) -> None:
        calls[frame.f_code.co_qualname] += event == "call" and frame.f_code.co_filename.startswith(ROOT)

    with gpu_path(), imitating():
        work = Work(Case(recipe=recipe, tensors=1, dtype="float32", numel=1088), CPU)
        for _ in range(13):
            work.step()
        monkeypatch.setattr(_Listed, "replay", lambda _: None)  # a GPU does this
        sys.setprofile(count)
        work.step()
        sys.setprofile(None)
    assert calls.total() <= most, calls


@pytest.mark.usefixtures("group")
def test_the_captures_of_a_recipe_that_is_gone_are_gone() -> None:
    """The recipe that a plan has now works on the buckets of the one before."""
    captured = weakref.WeakSet[_Listed]()
    with gpu_path(), imitating(), patched((Imitation, "captured", lambda self, work: _added(captured, work))):
        work = Work(Case(recipe="qsgd", tensors=1, dtype="float32", numel=1088), CPU)
        for _ in range(3):
            work.recipe = made("qsgd", work.segments.names)
            for _ in range(7):
                work.prepare()
                work.step()
            gc.collect()
            assert 0 < len(captured) <= 4  # to encode and decode, with two sets of buffers


@pytest.mark.usefixtures("group")
@pytest.mark.first(1)
@pytest.mark.parametrize(("recipe", "most"), [("qsgd", 0.6), ("terngrad", 0.3), ("signsgd", 8.5)])
def test_captures_keep_what_is_read_and_it_is_counted(recipe: str, most: float) -> None:
    """What travels, a bit to four; also the values where they are subtracted, in turn with those of a step before."""
    case = Case(recipe=recipe, tensors=1, dtype="float32", numel=4352)
    with gpu_path(), imitating():
        plain, replayed = Work(case, CPU), Work(case, CPU)
        for work in (plain, replayed):
            for _ in range(8):
                work.prepare()
                with patched((replay, "LANES", {})) if work is plain else nullcontext():
                    work.step()
        assert 0 < replayed.staging.nbytes - plain.staging.nbytes <= most * case.numel


@pytest.mark.usefixtures("group")
def test_the_captures_of_a_warm_up_are_gone_after_it() -> None:
    captured = weakref.WeakSet[_Listed]()
    with gpu_path(), imitating(), patched((Imitation, "captured", lambda self, work: _added(captured, work))):
        work = Work(Case(recipe="qsgd", tensors=1, dtype="float32", numel=1088), CPU)
        work.recipe = WarmUp(steps=7, first=work.recipe, then=made("dense", work.segments.names))
        held = []
        for _ in range(8):
            work.prepare()
            work.step()
            gc.collect()
            held.append(len(captured))
        assert held[6] > held[7] == 0


def _added(captured: "weakref.WeakSet[_Listed]", work: Callable[[], object]) -> _Listed:
    captured.add(found := _Listed(work, weakref.WeakSet()))
    return found


def test_numbers_that_change_are_sent_anew() -> None:
    out, x = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    with imitating():
        replays = Replays(CPU, "test")

        def work(seeds: Sequence[int]) -> Tensor:
            doubled = changing(lambda: [2 * seed for seed in seeds], len(seeds))
            out.copy_(sent_anew(lambda: torch.tensor(list(doubled)), CPU) + x + len(fixed(doubled)))
            return out

        for step in range(6):
            x.fill_(100 * step)
            found, captured = replays.run("key", work, [step, step + 1, step + 2])
            assert found.tolist() == [2 * step + 3 + 100 * step + add for add in (0, 2, 4)]
            assert (captured is not None) == (step >= 2)


def test_pinned_numbers_are_refilled_only_after_the_last_replay_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()
    monkeypatch.setattr(_Listed, "wait", staticmethod(lambda: order.append("wait")))
    monkeypatch.setattr(_Listed, "replay", lambda _: order.append("replay"))

    def work(seeds: Sequence[int]) -> Tensor:
        def numbers() -> Tensor:
            order.append("refill")
            return torch.tensor([*seeds])

        return sent_anew(numbers, CPU)

    with imitating():
        replays = Replays(CPU, "test")
        for step in range(5):
            replays.run("key", work, [step])
        assert order[-6:] == ["wait", "refill", "replay"] * 2


def test_captured_work_keeps_the_constants_that_the_cache_forgets() -> None:
    captured = Recording(torch.empty(16, dtype=torch.uint8))
    x = weakref.ref(constant((0.375, 0.625), torch.float32, CPU))
    with _recorded(captured):
        constant((0.375, 0.625), torch.float32, CPU)
    constant.cache_clear()
    assert x() is not None
    del captured
    assert x() is None


def test_work_that_reads_elsewhere_what_changes_is_never_captured() -> None:
    with imitating():
        replays = Replays(CPU, "test")
        for step in range(5):
            assert replays.run("key", lambda seeds: seeds[0] + 1, [step]) == (step + 1, None)


def test_what_cannot_be_captured_is_said_once_and_goes_on() -> None:
    with imitating():
        replays = Replays(CPU, "test")
        made: list[float] = []

        def work(_: Sequence[int]) -> float:
            made.append(len(made) + 0.0625)  # which no other test has asked for
            constant((made[-1],), torch.float32, CPU)  # in a capture it would be made anew, and for that alone
            return made[-1]

        for _ in range(2):
            replays.run("key", work)
        words = "launched one by one.* its rehearsal did not; expected the same.* THINWIRE_GRAPHS=0 captures none"
        with pytest.warns(UserWarning, match=words):
            replays.run("key", work)
        assert replays.run("key", work) == (4.0625, None)


def test_old_work_is_forgotten() -> None:
    with imitating():
        replays = Replays(CPU, "test")
        for _ in range(4):
            for key in range(40):
                assert replays.run(key, lambda _: 1) == (1, None)
        assert len(replays._pieces) <= 16


def test_what_is_dropped_lets_go_of_its_pinned_room_once_it_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(seeds: Sequence[int]) -> Tensor:
        return sent_anew(lambda: torch.tensor([*seeds]), CPU) + 1

    rooms, waited = list[weakref.ref[Tensor]](), list[bool]()
    monkeypatch.setattr(_Listed, "wait", staticmethod(lambda: waited.append(any(room() is not None for room in rooms))))
    with imitating(), collector_off():
        for key in ("first", "key"):  # what is met for the first time may leave a traceback, which holds the piece
            replays = Replays(CPU, "test")
            for step in range(3):
                _, piece = replays.run(key, work, [step, 1])
        assert piece is not None
        assert piece._recording is not None
        assert piece._recording._room is not None
        rooms.append(weakref.ref(piece._recording._room))
        waited.clear()
        del piece, replays
        assert rooms[0]() is None
        assert waited == [True]


def _holding(replays: Replays, _: Sequence[int]) -> list[Replays]:
    return [replays]


def test_a_result_may_hold_what_it_comes_from() -> None:
    with imitating():
        replays = Replays(CPU, "test")
        for _ in range(3):
            _, piece = replays.run("key", partial(_holding, replays))
        assert piece is not None
        dropped = weakref.ref(piece)
        del piece, replays, _
        gc.collect()
        assert dropped() is None


def test_what_is_never_captured_holds_nothing() -> None:
    with imitating():
        replays = Replays(CPU, "test")

        def work(seeds: Sequence[int], *, fails: bool) -> list[Tensor]:
            found = lasting([sent_anew(lambda: torch.zeros(9), CPU)])
            if fails:
                constant((float(len(rooms)),), torch.float32, CPU)
            elif seeds[0]:
                pass
            return found

        for fails in (True, False):
            rooms: list[Tensor] = []
            for _ in range(2):
                rooms += replays.run(fails, partial(work, fails=fails), [1])[0]
            with pytest.warns(UserWarning, match="launched one by one") if fails else nullcontext():
                replays.run(fails, partial(work, fails=fails), [1])
            recording = replays._pieces[fails]._recording
            assert recording is not None
            assert (recording._held, recording.places, recording._room) == ([], [], None)


def test_threads_that_ask_at_once_are_given_one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    made, together, again = list[object](), Barrier(2), Event()

    def make(device: torch.device, name: str) -> object:
        made.append(object())
        (again.set if len(made) > 1 else partial(again.wait, 0.5))()  # the other thread must not come here, too
        return made[-1]

    def ask() -> object:
        together.wait()
        return replay._lane(CPU, "threads")

    monkeypatch.setattr(replay, "LANES", {"cpu": make})
    with ThreadPoolExecutor(2) as pool:
        lanes = [pool.submit(ask) for _ in range(2)]
    assert [lane.result() for lane in lanes] == made * 2
    replay._lane.cache_clear()


def test_what_changes_is_read_when_it_is_needed() -> None:
    now = [1, 2, 3]
    numbers = Changing(lambda: now, 3)
    some = numbers[1:]
    now = [4, 5, 6]
    assert (list(numbers), list(some), numbers[0], len(some)) == ([4, 5, 6], [5, 6], 4, 2)


def test_captures_can_be_turned_off() -> None:
    assert [replay.wanted(asked) for asked in (None, "", "1", "0")] == [True, True, True, False]
    with pytest.raises(ValueError, match="THINWIRE_GRAPHS='no' is unknown; expected 1, or 0"):
        replay.wanted("no")
