"""The catalogue says what is so, and everything that lists methods lists these."""

from pathlib import Path

import pytest
from cases import CODECS, OPTIONS, RECIPES

from thinwire import codecs, recipes
from thinwire.planner.candidates import PLANNED
from thinwire.recipes import METHODS, Method, catalogue
from thinwire_lab.bench.methods import BENCHED

DOCS = Path(__file__).parents[2] / "docs"
OUTER = {"diloco", "muloco", "streaming_diloco", "sparseloco"}
OWN = {"dense", "torch_bf16", "torch_fp16", "torch_powersgd", "fsdp_bf16", "auto", *OUTER}
"""What only the bench has."""

every = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
TRAITS = {"momentum": "momentum", "warms_up": "warms up", "summed": "summed", "conserving": "lossless", "rows": "rows"}


def _markdown() -> str:
    """The methods as the table of docs/reference/recipes.md."""
    columns = ("method", "paper", "sends", "density", "traits")
    lines = [columns, ("---",) * len(columns), *map(_cells, METHODS.values())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(row: Method) -> tuple[str, ...]:
    density = "" if row.density is None else f"{row.density:g}"
    density += "" if row.share_of == "elements" else f" of {row.share_of}"
    traits = ", ".join(word for field, word in TRAITS.items() if getattr(row, field))
    return (f"`{row.name}`", row.paper, row.sends, density, traits)


def test_every_method_has_a_test_row_and_every_row_a_method() -> None:
    assert {case.method.name for case in RECIPES.values()} == set(METHODS)
    assert all(RECIPES[name].method is method for name, method in METHODS.items())
    assert set(OPTIONS) <= set(METHODS)


def test_every_codec_has_a_test_row() -> None:
    tested = {type(case.codec) for case in CODECS.values()}
    assert {getattr(codecs, name) for name in codecs.__all__} - {codecs.Codec} == tested
    low_rank = {"powersgd"}
    assert {type(METHODS[name].large().codec) for name in set(METHODS) - low_rank} <= tested


def test_every_recipe_is_a_method() -> None:
    made = {getattr(recipes, name) for name in recipes.__all__ if name.islower()}
    assert made <= {method.recipe for method in METHODS.values()}
    assert all(METHODS[recipe.__name__].recipe is recipe for recipe in made)


def test_a_name_is_given_once() -> None:
    assert len(METHODS) == len(catalogue._ROWS)


@every
def test_a_density_reaches_the_codec(method: Method) -> None:
    if method.density is None:
        with pytest.raises(TypeError, match="density"):
            method.recipe(density=0.5)
    else:
        assert method.large().codec == method.large(method.density).codec
        assert method.large(0.5).codec != method.large(0.25).codec


def test_the_bench_has_the_catalogues_methods_and_its_own() -> None:
    listed = {name: method for name, method in METHODS.items() if method.benched}
    assert set(BENCHED) == OWN | set(listed)
    for name, method in listed.items():
        recipe = BENCHED[name]
        said = method.summary, method.density is not None, method.warms_up
        assert (recipe.description, recipe.sparse, recipe.warms_up) == said
        assert recipe.density == (None if method.share_of == "elements" else method.density)


def test_the_planner_shares_one_memory_of_a_kind_among_its_methods() -> None:
    """A candidate is a codec and an exchange; what waits is kept by error feedback for all whose momentum stays."""
    kinds = {method.momentum: set[str]() for method in PLANNED.values()}
    for method in PLANNED.values():
        kinds[method.momentum].add(type(method.large().memory).__name__)
    assert kinds == {False: {"NoMemory", "ErrorFeedback"}, True: {"FadingMomentum", "OrthogonalMomentum"}}


def test_the_page_of_recipes_holds_the_catalogue() -> None:
    page = (DOCS / "reference" / "recipes.md").read_text()
    assert page.count("<!-- methods -->") == page.count("<!-- /methods -->") == 1
    table = page.partition("<!-- methods -->\n")[2].partition("<!-- /methods -->")[0]
    assert table == _markdown(), f"put this between the markers of docs/reference/recipes.md:\n{_markdown()}"
