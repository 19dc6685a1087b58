"""Tables of pooled seeds."""

from __future__ import annotations

from eagle3x.reporting.entries import Entry, Table, p_value, with_interval
from eagle3x.reporting.summary import Summary
from eagle3x.reporting.words import MINUS, NONE, figure, minus


def recipes_table(summary: Summary) -> Table:
    """One row per recipe: its tau over seeds, and where its width is from."""
    rows = [
        (
            Entry(r.label),
            Entry(", ".join(map(str, r.seeds))),
            Entry(str(r.prompts)),
            with_interval(figure(r.tau, 3)),
            Entry(", ".join(f"{tau:.3f}" for tau in r.per_seed)),
            Entry(f"±{r.by_seeds:.3f}"),
            with_interval(figure(r.by_prompts, 3)),
            Entry(r.sentence),
        )
        for r in summary.recipes
    ]
    headers = (
        "recipe", "seeds", "prompts", "τ over seeds", "τ of each seed", "other seeds", "other prompts, these seeds",
        "so",
    )  # fmt: skip
    note = "Cells that differ in their seed alone. The interval of τ is for other seeds and other prompts."
    return Table("recipes", "Recipes over seeds", note, headers, tuple(rows))


def recipe_comparisons_table(summary: Summary) -> Table:
    """Differences of recipes, paired by seed and prompt."""
    rows = [
        (
            Entry(f"{d.recipe} {MINUS} {d.baseline}"),
            Entry(", ".join(d.swept) or NONE, "code"),
            Entry(f"{len(d.seeds)} seeds, {d.prompts} prompts"),
            with_interval(figure(d.difference, 3, True)),
            Entry(f"±{d.by_seeds:.3f}"),
            Entry(f"±{d.by_prompts.half_width:.3f}"),
            Entry(f"{d.detectable:.3f}"),
            Entry(p_value(d.p_holm)),
            Entry(minus(d.verdict)),
        )
        for d in summary.recipe_comparisons
    ]
    headers = (
        "recipes", "swept", "over", "difference of τ", "other seeds", "other prompts", "smallest detectable",
        "p (Holm)", "verdict",
    )  # fmt: skip
    note = "Paired by seed and by prompt; p-values are adjusted for all comparisons in this table."
    return Table("recipe-comparisons", "Differences between recipes", note, headers, tuple(rows))
