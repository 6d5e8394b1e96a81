"""A check of whether EPS paid in a run, and from which context on it does: one line where it did not."""

from collections.abc import Callable
from typing import Any

from eps_core.attention.protocol import Backend
from eps_core.config.cache import CacheSpec
from eps_core.config.eps import EpsConfig
from eps_core.decode.cost import cost_of, pays_from

NOISE = 0.03  # of a dense run's speed: less is called as fast
LEAST_STEPS = 8  # timed, of each side: the median of fewer is chance
# times one layer when it is called: tokens of context; None: no context of the model
PaysFrom = Callable[[], int | None]


def timing(
    backend: Backend, device: str, kernels: str, spec: CacheSpec, num_heads: int, config: EpsConfig, max_context: int,
    whole_steps: bool = False,
) -> PaysFrom | None:  # fmt: skip
    """Return a function that measures where a config pays on this device (`cost.measure`); None where times say
    nothing, as those of array operations and of the numpy backend."""
    if kernels == "arrays":
        return None

    def timed() -> int | None:
        cost, _ = cost_of(backend, device, kernels, spec, num_heads, config, max_context, whole_steps)
        tokens = pays_from(config, cost)
        return None if tokens is None or tokens > max_context else tokens

    return timed


def slower_note(
    label: str, context: int, dense: dict[str, Any], eps: dict[str, Any], pays: PaysFrom | None, paced: bool = False
) -> str | None:
    """One line where a side called `label` is slower than dense, from both summaries: by how much, and from where on it
    pays; else None. `paced`: verified drafts were as many as pay already."""
    before, now = dense["tokens_per_s"], eps["tokens_per_s"]
    if before is None or now is None or now > (1 - NOISE) * before:
        return None
    if min((side.get("rounds") or side["steps"]) - side["warm_up_steps"] for side in (dense, eps)) < LEAST_STEPS:
        return None
    dense_steps = eps.get("pages_skipped") == 0 and not eps.get("rounds")
    if dense_steps and label == "EPS":
        return None  # a few short ones differ by chance
    here = f"{label} is slower than dense here, {now:.1f} tokens a second against {before:.1f} at {context:,} tokens"
    if dense_steps or not label.startswith("EPS") or " + " in label:
        return f"{here}: what it saves is memory"
    return f"{here}, and does not pay: {_from_where(context, before / now, eps, pays, paced)}"


def _from_where(context: int, times: float, eps: dict[str, Any], pays: PaysFrom | None, paced: bool) -> str:
    if eps.get("rounds"):
        got = eps["tokens_per_round"]
        fix = "leave --eps-verify out" if paced else "use --eps-draft auto, which drafts where it pays"
        return f"a round gives {got:.1f} tokens and must give more than {times * got:.1f}: {fix}"
    if pays is None:
        return "array operations are for checks, and their times say nothing: use --backend auto --kernels auto"
    tokens = pays()
    if tokens is None:
        return "it pays at no context that this model holds (estimated from one layer's times): use --method off"
    if tokens <= context:
        return (
            f"one layer alone pays from about {tokens:,} tokens on, the rest of a step costs more than that saves: use "
            "longer contexts"
        )
    return (
        f"it pays from about {tokens:,} tokens on (estimated from one layer's times): use longer contexts, or "
        f"--eps-min-context {tokens}"
    )
