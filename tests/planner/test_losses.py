"""What methods cost in loss: the table, the budget that follows from it, and what a plan says."""

import json
from pathlib import Path

import pytest
from plans import cost, linear, profile

from thinwire.exchanges import Link
from thinwire.memories import OrthogonalMomentum
from thinwire.planner import Budget, Plan, decide
from thinwire.planner.candidates import ALLOWED, LOSSES, PLANNED, Measured, OptimizerName, in_words, measured, within
from thinwire.planner.live import Adaptive
from thinwire.recipes import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "recipes.md"
SLOW = Link(latency=0.0, bandwidth=1e6)


def _plan(name: str, budget: Budget) -> Plan:
    costs = {name: cost(nbytes=linear(0.08))}
    return decide(profile({0.01: [("w", 1_000_000)]}, link=SLOW, costs=costs), budget)


def test_every_row_is_of_a_method_and_no_figure_is_given_twice() -> None:
    keys = [(method, row.optimizer, row.density) for row in LOSSES for method in row.methods]
    assert len(set(keys)) == len(keys)
    assert {method for method, *_ in keys} <= {**METHODS, **PLANNED}.keys()
    for method, _, density in keys:
        assert (density is None) == ({**METHODS, **PLANNED}[method].density is None)


def test_each_measurement_has_one_dense_run() -> None:
    runs: dict[tuple[str, str], set[float]] = {}
    for row in LOSSES:
        runs.setdefault((row.source, row.optimizer), set()).add(row.dense)
    assert all(len(found) == 1 for found in runs.values()), runs


def test_a_figure_counts_for_its_density_and_its_optimizer() -> None:
    row = measured("sampled_topk:0.01", "sgd")
    assert row is not None
    assert row.ratio == pytest.approx(2.209 / 2.014)
    assert measured("sampled_topk:0.02", "sgd") is None
    other = measured("topk:0.01", "adamw")
    assert other is not None
    assert other.ratio > row.ratio


def test_least_harm_comes_first_and_luck_does_not_count() -> None:
    assert within(1.15, "sgd", ["topk:0.01", "fp16", "terngrad", "qsgd", "gtopk:0.01"]) == [
        *("fp16", "terngrad", "qsgd", "topk:0.01")
    ]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_by_default_a_budget_holds_what_was_measured_within_one_percent(optimizer: OptimizerName) -> None:
    budget = Budget.under(optimizer)
    assert budget.optimizer == optimizer
    assert "topk:0.01" not in budget.names
    assert "fp16" not in budget.names, "it overflows"
    for name in budget.names:
        row = measured(name, optimizer)
        assert row is not None
        assert row.ratio <= ALLOWED


def test_what_costs_more_must_be_asked_for() -> None:
    assert not any(":" in name for name in Budget.under("sgd").names)
    asked = Budget.under("sgd", densities=(0.01, 0.001), loss=1.15)
    assert "sampled_topk:0.01" in asked.names
    assert "sampled_gtopk:0.01" not in asked.names, "dearer still"
    assert "sampled_topk:0.001" not in asked.names, "not measured"
    assert [c.name for c in asked.candidates()][1:] == list(asked.names)
    assert [c.name for c in Budget(names=("topk",), optimizer="adamw").candidates()] == ["dense", "topk:0.01"]


def test_nothing_waits_without_error_feedback_whatever_it_costs() -> None:
    found = Budget.under("sgd", loss=1.15, error_feedback=False).candidates()
    assert not any(candidate.feedback for candidate in found)
    assert not any(candidate.feedback for candidate in Budget(names=("topk:0.05",), error_feedback=False).candidates())


def test_momentum_is_moved_only_by_choice_and_last() -> None:
    assert list(Budget.under("adamw").names) == ["bf16", "qsgd", "orthogonal:0.0234375"], (
        "none harms, the last moves it"
    )
    adamw = Budget.under("adamw", densities=(0.01, 0.001), loss=1.05)
    own = ["orthogonal:0.0234375", "terngrad", "fading:0.0234375"]
    assert list(adamw.names) == ["bf16", "qsgd", *own], "at their own density"
    assert list(adamw.without_momentum().names) == ["bf16", "qsgd", "terngrad"]
    assert list(adamw.switchable().names) == ["bf16", "qsgd", "terngrad", "fading:0.0234375"]
    assert Budget().switchable() == Budget()
    assert adamw.without_momentum().optimizer == "adamw"
    for other in (Budget(), Budget.under("sgd"), Budget.under("muon")):
        assert other.without_momentum() == other
    both = Budget(names=("fading", "fading:0.05")).candidates()
    assert [c.name for c in both] == ["dense", "fading:0.0234375", "fading:0.05"]
    assert not any(c.momentum for c in Budget.under("adamw", error_feedback=False).candidates())


def test_without_an_optimizer_a_budget_is_the_usual_one() -> None:
    assert Budget.under(None) == Budget()
    assert Budget().names == ("bf16", "qsgd_l2", "sampled_topk", "sampled_doubling", "sampled_gtopk")


def test_a_name_may_have_a_density_of_its_own() -> None:
    budget = Budget(names=("topk:0.05", "gtopk"), densities=(0.01, 0.1))
    assert [c.name for c in budget.candidates()] == ["dense", "topk:0.05", "gtopk:0.01", "gtopk:0.1"]
    twice = Budget(names=("topk:0.01", "topk")).candidates()
    assert [c.name for c in twice] == ["dense", "topk:0.01"], "and is measured once"
    assert Budget(names=("orthogonal:0.05", "bf16")).switchable() == Budget(names=("bf16",))
    with pytest.raises(ValueError, match=r"no candidate is called 'bf16:0\.5'"):
        Budget(names=("bf16:0.5",))


def test_a_plan_says_what_it_is_expected_to_cost() -> None:
    plan = _plan("topk:0.01", Budget(names=("topk",), optimizer="sgd"))
    assert plan.expected_loss == (
        "Expected loss under sgd: topk:0.01 ended at 1.10 times dense's (2.209 against 2.014)."
    )
    assert plan.why().decision == f"{plan.verdict}. {plan.expected_loss}"
    document = json.loads(plan.to_json())
    assert (document["optimizer"], document["expected_loss"]) == ("sgd", plan.expected_loss)
    unknown = _plan("topk:0.02", Budget(names=("topk:0.02",), optimizer="sgd"))
    assert unknown.expected_loss == "Expected loss under sgd: that of topk:0.02 was not measured."


def test_a_plan_takes_orthogonal_under_adamw_and_says_with_which_betas() -> None:
    plan = _plan("orthogonal:0.0234375", Budget.under("adamw"))
    assert set(plan.choice.values()) == {"orthogonal:0.0234375"}
    assert plan.expected_loss == (
        "Expected loss under adamw: orthogonal:0.0234375 ended at 0.97 times dense's (1.616 against 1.669, with betas "
        "(0.9, 0.9))."
    )
    (memory,) = (memory for memory in plan.reducer().memories() if memory.stateful)
    assert isinstance(memory, OrthogonalMomentum)
    assert memory.momentum is None, "it takes AdamW's"


def test_a_plan_names_what_it_might_have_chosen_had_it_been_measured() -> None:
    plan = _plan("bf16", Budget.under("adamw"))
    assert plan.unmeasured == ("qsgd", "orthogonal:0.0234375")
    assert plan.why().decision.endswith(plan.missing)
    assert plan.missing.startswith("Allowed by the budget under adamw, but not measured in this profile: qsgd, orth")
    assert json.loads(plan.to_json())["unmeasured"] == ["qsgd", "orthogonal:0.0234375"]
    whole = _plan("bf16", Budget(names=("bf16",)))
    assert (whole.missing, "unmeasured" in json.loads(whole.to_json())) == ("", False)


def test_without_an_optimizer_a_plan_says_nothing_of_it() -> None:
    plan = _plan("topk:0.01", Budget(names=("topk",)))
    assert plan.pays
    assert plan.why().decision == plan.verdict
    assert plan.expected_loss == ""
    assert not {"optimizer", "expected_loss"} & json.loads(plan.to_json()).keys()


def test_each_method_is_told_once() -> None:
    assert in_words(["topk:0.01", "topk:0.01"], "sgd").count("topk") == 1
    assert in_words([], "sgd") == ""


def test_what_is_decided_in_training_says_what_it_costs() -> None:
    adaptive = Adaptive(Budget(names=("topk",), optimizer="sgd"), sizes=[])
    assert adaptive._with_loss("first plan", {"w": "topk:0.01"}).startswith("first plan. Expected loss under sgd: topk")
    assert adaptive._with_loss("first plan", {}) == "first plan"
    assert Adaptive(Budget(names=("topk",)), sizes=[])._with_loss("so", {"w": "topk:0.01"}) == "so"


def _markdown() -> str:
    titles = ("optimizer", "method", "density", "loss", "dense's", "ratio", "measured in")
    lines = [titles, ("---",) * len(titles), *map(_cells, LOSSES)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(row: Measured) -> tuple[str, ...]:
    methods = ", ".join(f"`{method}`" for method in row.methods)
    density = "" if row.density is None else f"{row.density:g}"
    losses = (f"{row.loss:.3f}", f"{row.dense:.3f}", f"{row.ratio:.2f}")
    return (row.optimizer, methods, density, *losses, row.source)


def test_the_page_has_the_table() -> None:
    table = PAGE.read_text().partition("<!-- losses -->\n")[2].partition("<!-- /losses -->")[0]
    assert table == _markdown(), f"put this between the markers of docs/explanation/recipes.md:\n{_markdown()}"
