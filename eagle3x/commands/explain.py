"""What a figure that an engine printed means: `command=explain rate=0.42 num_draft_tokens=4`."""

from __future__ import annotations

from rich.console import Console

from eagle3x.commands.config import ExplainArgs
from eagle3x.types import ConfigError

USAGE = "for example command=explain rate=0.42 num_draft_tokens=4, or command=explain tau=1.68 num_speculative_tokens=3"
PRINTED = (
    "What is printed where, for chains:",
    "  vLLM 0.32: 'Mean acceptance length' is tau, 'Avg Draft acceptance rate' is draft efficiency in percent,"
    " 'Per-position acceptance rate' is survival.",
    "  SGLang 0.5.14 and 0.5.23: 'accept len' in the log is tau; 'accept rate' and spec_accept_rate are draft"
    " efficiency. spec_accept_length of a request also counts its prefill token: use 1 + correct drafts / verify_ct.",
    "  Older SGLang: 'accept len' is tau; 'accept rate' is slot use, the bonus token included.",
)
ROUNDING = 0.005
"""Engines print rates with two digits."""


def explain(
    *,
    rate: float | None = None,
    tau: float | None = None,
    num_draft_tokens: int | None = None,
    num_speculative_tokens: int | None = None,
) -> list[str]:
    """Lines that say what the figure means. With k = num_speculative_tokens drafts per verify step:

    tau = 1 + accepted / verify steps, draft efficiency = (tau - 1) / k, slot use = tau / (k + 1).
    `num_draft_tokens` is SGLang's name for the k + 1 slots of a chain. A rate may be given as 0.42 or as 42 (percent).
    Raises ConfigError on figures that cannot be.
    """
    k = _length(num_draft_tokens, num_speculative_tokens)
    head = f"A chain of {k} drafts per verify step: num_speculative_tokens={k}, on SGLang num_draft_tokens={k + 1}."
    if (rate is None) == (tau is None):
        raise ConfigError(f"explain needs one figure, rate or tau: {USAGE}")
    if tau is not None:
        if not 1 <= tau <= k + 1:
            raise ConfigError(
                f"tau={tau:g} is impossible: a verify step yields 1 (the bonus token alone) to {k + 1} tokens when {k}"
                " are drafted. SGLang's spec_accept_length can pass this, because it counts the prefill token"
            )
        return [head, *_meaning(tau, k), *PRINTED]
    assert rate is not None
    share = _share(rate, k)
    lines = [head, f"A rate of {share:.1%} has two readings."]
    slot_tau, draft_tau = share * (k + 1), 1 + share * k
    lines.append(f"Read as slot use, tau / {k + 1}:")
    if slot_tau < 1 - ROUNDING * (k + 1):
        lines.append(
            f"  impossible: it would mean tau = {slot_tau:.2f}, but the bonus token alone is tau = 1.00,"
            f" a slot use of {1 / (k + 1):.0%}"
        )
    else:
        lines += ["  " + line for line in _meaning(min(max(slot_tau, 1.0), k + 1.0), k)]
    lines.append(f"Read as draft efficiency, accepted / drafted = (tau - 1) / {k}:")
    lines += ["  " + line for line in _meaning(draft_tau, k)]
    return lines + list(PRINTED)


def run(args: ExplainArgs, console: Console) -> None:
    """Print the explanation."""
    lines = explain(
        rate=args.rate,
        tau=args.tau,
        num_draft_tokens=args.num_draft_tokens,
        num_speculative_tokens=args.num_speculative_tokens,
    )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _length(num_draft_tokens: int | None, num_speculative_tokens: int | None) -> int:
    if num_draft_tokens is None and num_speculative_tokens is None:
        raise ConfigError(f"explain needs num_draft_tokens (SGLang) or num_speculative_tokens (vLLM): {USAGE}")
    if num_draft_tokens is not None and num_draft_tokens < 2:
        raise ConfigError(
            f"num_draft_tokens={num_draft_tokens} leaves no room for a draft: it is at least 2, one draft and the"
            " token that is verified with it"
        )
    if num_speculative_tokens is not None and num_speculative_tokens < 1:
        raise ConfigError(f"num_speculative_tokens={num_speculative_tokens} drafts nothing: it is at least 1")
    if num_speculative_tokens is None:
        assert num_draft_tokens is not None
        return num_draft_tokens - 1
    if num_draft_tokens is not None and num_draft_tokens != num_speculative_tokens + 1:
        raise ConfigError(
            f"num_draft_tokens={num_draft_tokens} and num_speculative_tokens={num_speculative_tokens} are not the same"
            f" chain: num_draft_tokens would be {num_speculative_tokens + 1}. Give one of them"
        )
    return num_speculative_tokens


def _share(rate: float, k: int) -> float:
    """0.42 and 42 are the same rate. Just above 1 it could be a percentage or a length: we don't guess."""
    if rate < 0 or rate > 100:
        raise ConfigError(f"rate={rate:g} is impossible: give a share such as 0.42 or a percentage such as 42")
    if rate <= 1:
        return rate
    if rate <= k + 1:
        raise ConfigError(
            f"rate={rate:g} is more than 1: for an acceptance length give tau={rate:g}, for {rate:g} % give"
            f" rate={rate / 100:g} (a rate is a share such as 0.42 or a percentage such as 42)"
        )
    return rate / 100


def _meaning(tau: float, k: int) -> list[str]:
    accepted = tau - 1
    efficiency, slots = accepted / k, tau / (k + 1)
    if accepted < 1e-9:
        said = "no draft was ever accepted"
    elif k + 1 - tau < 1e-9:
        said = "every draft was accepted"
    else:
        said = f"{accepted:.2f} of {k} drafts accepted per verify step, and the bonus token"
    return [f"tau = {tau:.2f}: {said}", f"draft efficiency = {efficiency:.1%}, slot use = {slots:.1%}"]
