"""What a bench run leaves behind: the document, the tables, the figures, the page and the live progress."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from thinwire_lab.bench import plots
from thinwire_lab.bench.report import html, in_words, print_report
from thinwire_lab.bench.results import Quantiles, Results, Row, Split, Spread, WireBytes
from thinwire_lab.show.page import Files, page
from thinwire_lab.show.progress import BenchProgress
from thinwire_lab.show.table import Column, duration, human_bytes, tabulated
from thinwire_lab.show.terminal import print_titled

STEPS = 300
DENSE_BYTES = 3_010_000.0
TARGET = 2.23


def curve(step: float, sent: float, final: float, steps: int) -> tuple[tuple[float, float, float], ...]:
    """A held-out loss falling from 4.2 to ``final`` at ``STEPS``, and a little on if trained on."""
    points = range(0, steps + 1, 10)
    return tuple(
        (n * step, n * sent, final + 1.97 * (math.exp(-n / 45) - math.exp(-STEPS / 45)) - 4e-4 * (n - STEPS))
        for n in points
    )


def row(
    recipe: str, density: float, step: float, parts: tuple[float, ...], sent: float, loss: float, trained: int = STEPS
) -> Row:
    losses = curve(step, sent, loss, trained)
    reached = [seconds for seconds, _, value in losses if value <= TARGET + 1e-9]
    return Row(
        recipe=recipe,
        density=density,
        boundary=1.0,
        steps=STEPS,
        step_seconds=Quantiles(p20=0.985 * step, p50=step, p80=1.03 * step),
        split_seconds=Split(**dict(zip(("compute", "encode", "exchange", "decode"), parts, strict=True))),
        wire_bytes_per_step=WireBytes(
            measured=1.035 * sent, declared=None if recipe.startswith("torch") else sent, dense=DENSE_BYTES
        ),
        loss_curve=losses,
        final_loss=loss,
        seconds_to_target=reached[0] if reached else None,
        speedup_vs_dense=0.350 / step,
        replicas_identical=True,
    )


def example(**environment: object) -> Results:
    """A run as the bench writes it: six recipes on a link of 100 Mbit/s."""
    rows = (
        row("dense", 1.0, 0.350, (0.106, 0.0, 0.244, 0.0), DENSE_BYTES, 2.23),
        row("torch_fp16", 1.0, 0.229, (0.106, 0.001, 0.121, 0.001), DENSE_BYTES / 2, 2.23),
        row("torch_powersgd", 1.0, 0.140, (0.106, 0.008, 0.022, 0.004), 171_000.0, 2.34, 450),
        row("topk", 0.01, 0.122, (0.106, 0.006, 0.0082, 0.0018), 60_200.0, 2.37, 450),
        row("dgc", 0.01, 0.120, (0.106, 0.004, 0.0083, 0.0017), 60_300.0, 2.27, 450),
        row("dragonn", 0.01, 0.118, (0.106, 0.0024, 0.0081, 0.0015), 62_000.0, 2.28, 450),
    )
    return Results(environment={**ENVIRONMENT, **environment}, rows=rows)


ENVIRONMENT: dict[str, object] = {
    "model": "char-transformer",
    "model_description": "4-layer transformer, 501 760 parameters, next character of Shakespeare",
    "link": "100 Mbit/s per worker, each way",
    "throttled": True,
    "workers": 4,
    "steps": STEPS,
    "seed": 0,
    "cpu": "AMD EPYC 7B13",
    "cores": 16,
    "versions": {"python": "3.11.7", "torch": "2.13.0", "thinwire": "0.1.0", "numba": "0.61.0"},
    "date": "2026-01-15T10:20:30+00:00",
    "target_loss": TARGET,
    "free_network_step_seconds": {"p20": 0.108, "p50": 0.110, "p80": 0.113},
    "protocol_overhead": {"dense": 0.034, "topk 0.01": 0.041, "dgc 0.01": 0.041, "dragonn 0.01": 0.040},
    "complete": True,
    "reason": None,
}


UNTHROTTLED = {"throttled": False, "link": "UNTHROTTLED (no network namespaces)"}
FIGURES = (plots.loss_over_seconds, plots.loss_over_bytes)


@pytest.fixture
def results() -> Results:
    return example()


def edited(results: Results, place: int, **fields: Any) -> Results:
    rows = list(results.rows)
    rows[place] = replace(rows[place], **fields)
    return replace(results, rows=tuple(rows))


def sparse() -> Results:
    """Everything that may be null, is; and one row has diverged before its first step was counted."""
    unknown = WireBytes(measured=None, declared=None, dense=DENSE_BYTES)
    lost: dict[str, Any] = {"wire_bytes_per_step": unknown, "seconds_to_target": None, "speedup_vs_dense": None}
    results = example(target_loss=None, free_network_step_seconds=None, protocol_overhead=None)
    results = replace(results, rows=tuple(replace(row, **lost) for row in results.rows[2:]))
    results = edited(results, 0, loss_curve=((0.0, 0.0, 4.2), (1.0, 1e5, math.nan), (2.0, 2e5, math.inf)))
    return edited(edited(results, 0, final_loss=math.nan), 1, loss_curve=(), replicas_identical=False)


def printed(results: Results, width: int = 100, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    print_report(Console(file=stream, width=width), results)
    stream.flush()
    return raw.getvalue().decode(encoding)


def test_the_document_survives_a_round_trip(results: Results) -> None:
    assert Results.from_json(json.loads(json.dumps(results.to_json()))) == results


def test_the_document_has_exactly_the_promised_keys(results: Results) -> None:
    document = results.to_json()
    assert list(document) == ["schema", "environment", "rows"]
    assert document["schema"] == "thinwire.bench/2"
    assert " ".join(document["rows"][0]) == (
        "recipe density boundary steps step_seconds split_seconds wire_bytes_per_step loss_curve final_loss "
        "seconds_to_target speedup_vs_dense replicas_identical"
    )
    assert document["rows"][0]["loss_curve"][1][:2] == [3.5, 10 * DENSE_BYTES]


def test_what_is_not_a_number_is_null_in_the_document() -> None:
    document = json.loads(json.dumps(sparse().to_json()), parse_constant=pytest.fail)
    assert document["rows"][0]["final_loss"] is None
    assert math.isnan(Results.from_json(document).rows[0].loss_curve[2][2])


def test_a_document_of_another_schema_is_refused(results: Results) -> None:
    with pytest.raises(ValueError, match="schema"):
        Results.from_json(results.to_json() | {"schema": "thinwire.bench/1"})


def test_an_earlier_file_survives_a_failing_write(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    path = tmp_path / "out.svg"
    path.write_text("earlier")
    monkeypatch.setattr(Path, "replace", full)
    for files in (Files(json=path), Files(plot=path)):
        with pytest.raises(OSError, match="no space"):
            files.write(results.to_json(), lambda: "", lambda: plots.loss_over_bytes(results))
        assert path.read_text() == "earlier"
        assert list(tmp_path.iterdir()) == [path]


def test_labels_name_the_density_of_a_sparsifier_only(results: Results) -> None:
    assert [row.label for row in results.rows][::4] == ["dense", "dgc 0.01"]


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (999_700, "1.00 MB"), (62_000, "62.0 kB")])
def test_bytes_are_read_in_decimal_units(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(41.23, "41.2 s"), (725, "12 min 05 s"), (11520, "3 h 12 min")])
def test_durations_read_naturally(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_of_the_table_is_wider_than_the_console(results: Results, width: int) -> None:
    lines = printed(results, width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum("recipe" in line for line in lines) == (1 if width == 200 else 2)
    assert any(line.startswith("dragonn 0.01") and "118 (116-122)" in line for line in lines)


def test_the_table_holds_every_measure(results: Results) -> None:
    dgc = next(line for line in printed(results, 200).splitlines() if line.startswith("dgc"))
    assert re.sub(r"\s\s+", "|", dgc.strip()) == (
        "dgc 0.01|120 (118-124)|1.09x|106|4.0|8.3|1.7|1.91x|62.4 kB|60.3 kB|3.01 MB|2.270|48.0 s|✓"
    )


def test_the_words_say_what_is_better_and_what_was_not_reached(results: Results) -> None:
    first, lowest, split = in_words(results)
    assert (
        "dgc 0.01, in 48.0 s (dragonn 0.01 within 5%), 1.4 times as fast as torch_fp16 and 2.2 times as fast as dense"
        in first
    )
    assert "Not reached by torch_powersgd and topk 0.01" in first
    assert "dense and torch_fp16, 2.230" in lowest
    assert "dragonn 0.01, the shortest, is 7% exchange" in split
    assert "dense is 70% exchange" in split


def test_a_target_that_needs_no_step_is_said_so(results: Results) -> None:
    at_once = replace(results, rows=tuple(replace(row, seconds_to_target=0.0) for row in results.rows))
    assert in_words(at_once)[0] == "Before the first step the loss is at the target of 2.230: times to it say nothing."


def test_a_target_that_nobody_reached_is_said_so(results: Results) -> None:
    rows = tuple(replace(row, seconds_to_target=None) for row in results.rows)
    missed = replace(results, rows=rows)
    assert in_words(missed)[0] == "No recipe reached the target loss of 2.230."
    assert printed(missed).count("not reached") == len(rows)


def test_nulls_are_dashes_and_divergence_is_named() -> None:
    text = printed(sparse(), 200)
    assert "None" not in text
    assert "nan" not in text
    assert "diverged" in text
    assert "needs network namespaces" in text
    assert "The replicas of topk 0.01 came apart" in text


def test_a_log_without_unicode_gets_the_table_too() -> None:
    spread = Spread(
        seeds=(0, 1), final_loss=(2.2, 2.26), seconds_to_target=(1.0, 2.0), loss_deviation=0.04, curve_deviation=()
    )
    said = printed(edited(example(link="100 Mbit/s"), 0, spread=spread), encoding="ascii")
    assert "yes" in said
    assert "2.230 +- 0.040" in said


def test_markup_in_a_label_is_shown_as_it_is() -> None:
    assert "a[bold]b" in printed(example(model="a[bold]b"))


def test_an_unthrottled_run_is_labelled_everywhere() -> None:
    free = example(**UNTHROTTLED)
    assert "UNTHROTTLED" in printed(free).splitlines()[0]
    assert "say nothing about a slow" in printed(free)
    assert "UNTHROTTLED" in html(free)
    assert all("UNTHROTTLED" in figure(free).get_suptitle() for figure in FIGURES)


def test_an_unthrottled_run_is_labelled_whatever_its_link_says() -> None:
    assert example(throttled=False).title.endswith("UNTHROTTLED (100 Mbit/s per worker, each way)")


def test_an_incomplete_run_is_labelled_everywhere() -> None:
    cut = example(complete=False, reason="worker 2 died")
    assert "INCOMPLETE: worker 2 died" in printed(cut)
    assert "INCOMPLETE: worker 2 died" in html(cut)
    assert all("INCOMPLETE" in figure(cut).get_suptitle() for figure in FIGURES)


def rendered(figure: Figure) -> bytes:
    drawing = io.BytesIO()
    figure.savefig(drawing, format="png", dpi=50)
    return drawing.getvalue()


@pytest.mark.parametrize("draw", FIGURES)
def test_figures_bear_nulls_and_divergence(draw: Callable[[Results], Figure]) -> None:
    assert rendered(draw(sparse())).startswith(b"\x89PNG")


@pytest.mark.parametrize("rows", [0, 1, 6])
def test_figures_bear_any_number_of_rows(results: Results, rows: int) -> None:
    few = replace(results, rows=results.rows[:rows])
    assert all(rendered(draw(few)).startswith(b"\x89PNG") for draw in FIGURES)


def test_a_title_is_never_read_as_mathematics() -> None:
    assert rendered(plots.loss_over_seconds(example(model=r"$\nothing$"))).startswith(b"\x89PNG")


def test_a_recipe_keeps_its_colour_and_its_densities_differ_in_dashes(results: Results) -> None:
    sparser = replace(results.rows[4], density=0.001)
    axes = plots.loss_over_bytes(replace(results, rows=(*results.rows, sparser))).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["dgc 0.01"].get_color() == lines["dgc 0.001"].get_color()
    assert lines["dgc 0.01"].get_linestyle() != lines["dgc 0.001"].get_linestyle()
    assert len({line.get_color() for label, line in lines.items() if label != "dgc 0.001"}) == len(lines) - 1


def test_no_two_rows_look_alike(results: Results) -> None:
    both = (replace(row, recipe=f"{row.recipe}{n}", density=d) for n in (1, 2) for row in results.rows for d in (1, 2))
    lines = plots.loss_over_bytes(replace(results, rows=tuple(both), environment={})).axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == 24


def test_the_page_needs_nothing_beside_it(results: Results) -> None:
    page = html(results)
    assert not re.search(r"https?:|<link|<script|@import|url\(", page)
    assert re.findall(r'src="([^;]*);', page) == ["data:image/svg+xml"] * 2
    assert "cpu: AMD EPYC 7B13; cores: 16" in page


def test_the_page_escapes_every_text(results: Results) -> None:
    evil = "<script>alert('&')</script>"
    page = html(
        edited(example(model=evil, model_description=evil, link=evil, cpu=evil, **{evil: {evil: evil}}), 0, recipe=evil)
    )
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_a_run_without_rows_still_has_a_page_and_words(results: Results) -> None:
    empty = replace(results, rows=())
    assert "No recipe finished." in printed(empty)
    assert "No recipe finished." in html(empty)


def bench_two_rows(console: Console) -> None:
    now = [0.0]
    progress = BenchProgress(console, 2, clock=lambda: now[0])
    with progress.bars:
        for label in ("dense", "dgc [0.01]"):
            progress.start_row(label, 10)
            for step in range(13):
                now[0] += 1.0
                progress.advance(step, 2.5 if step % 5 == 0 else None, 1.0)
            progress.finish_row("loss 2.5")


def test_a_log_gets_one_line_per_finished_row() -> None:
    log = io.StringIO()
    bench_two_rows(Console(file=log, width=40))
    assert log.getvalue() == "1/2 dense: loss 2.5 (about 13.0 s left)\n2/2 dgc [0.01]: loss 2.5\n"


def test_a_terminal_gets_bars_with_loss_and_time() -> None:
    screen = io.StringIO()
    bench_two_rows(Console(file=screen, width=100, force_terminal=True, force_interactive=True))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "all rows" in shown
    assert "2/2" in shown
    assert "1/2 dense: loss 2.5 (about 13.0 s left)" in shown


WRONG = tabulated(
    [
        Column[int](heading="a\nname", text=str, left=True),
        Column[int](heading="sum", text=lambda x: "exact" if x else "WRONG", wrong=lambda x: not x),
    ],
    [1, 0],
    title="sums",
)


def test_a_wrong_cell_alarms() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=40)
    with console.capture() as said:
        print_titled(console, WRONG)
    assert said.get().count("\x1b[1;31mWRONG") == 1
    assert "\x1b[1;31mexact" not in said.get()
    assert page("sums", lambda console: print_titled(console, WRONG)).count('font-weight: bold">WRONG</span>') == 1
