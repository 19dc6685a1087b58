"""Two suspects on identical text: the boundaries that are fed, and the states of a served (quantized) target.

                     states as trained    states as served
    right boundaries     right_plain         right_served
    shifted boundaries   shifted_plain       shifted_served

The offset's effect is down the first column, the states' along the first row, and the interaction is what both together
lose beyond the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eagle3x.benchmark.statistics import (
    Array,
    Bootstrap,
    Comparison,
    Interval,
    cluster_sums,
    compare,
    holm,
    tau_columns,
    tau_interval,
)
from eagle3x.types import SpecCounters


@dataclass(frozen=True)
class OffsetQuantization:
    """`taus` in the order right_plain, shifted_plain, right_served, shifted_served; effects are differences of tau.

    shifted: the boundaries of the lower row. hypothetical: nothing is fed wrong; they are one block late, for scale.
    p_holm: of offset, states and interaction.
    """

    right: tuple[int, ...]
    shifted: tuple[int, ...]
    hypothetical: bool
    taus: tuple[Interval, Interval, Interval, Interval]
    offset: Comparison
    states: Comparison
    interaction: Comparison
    p_holm: tuple[float, float, float]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        names = ("right_plain", "shifted_plain", "right_served", "shifted_served")
        return {
            "right": list(self.right),
            "shifted": list(self.shifted),
            "hypothetical": self.hypothetical,
            "taus": {name: asdict(tau) for name, tau in zip(names, self.taus, strict=True)},
            **{
                name: {**asdict(effect.difference), "p_holm": p, "detectable": effect.detectable}
                for name, effect, p in zip(
                    ("offset", "states", "interaction"),
                    (self.offset, self.states, self.interaction),
                    self.p_holm,
                    strict=True,
                )
            },
        }


def two_by_two(
    cells: Sequence[Sequence[SpecCounters]],
    prompts: Sequence[str],
    right: tuple[int, ...],
    shifted: tuple[int, ...],
    hypothetical: bool,
    bootstrap: Bootstrap,
) -> OffsetQuantization:
    """Effects of `cells`: right_plain, shifted_plain, right_served, shifted_served; row i of each is `prompts[i]`."""
    right_plain, shifted_plain, right_served, shifted_served = (tau_columns(cell) for cell in cells)
    sums = cluster_sums(np.hstack([right_plain, shifted_plain, right_served, shifted_served]), prompts)

    def tau(totals: Array, cell: int) -> Array:
        return totals[..., 2 * cell] / totals[..., 2 * cell + 1]

    offset = compare(sums, lambda s: tau(s, 1) - tau(s, 0), bootstrap)
    states = compare(sums, lambda s: tau(s, 2) - tau(s, 0), bootstrap)
    interaction = compare(sums, lambda s: tau(s, 3) - tau(s, 2) - tau(s, 1) + tau(s, 0), bootstrap)
    p_offset, p_states, p_both = holm([offset.p_value, states.p_value, interaction.p_value])
    a, b, c, d = (tau_interval(cell, prompts, bootstrap) for cell in cells)
    return OffsetQuantization(
        right, shifted, hypothetical, (a, b, c, d), offset, states, interaction, (p_offset, p_states, p_both)
    )
