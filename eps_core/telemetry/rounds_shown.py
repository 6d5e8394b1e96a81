"""How verified decoding is shown to people and scripts: a line of settings, rows of the table, the last JSON line."""

from typing import Any

from eps_core.config.eps import EpsConfig
from eps_core.config.verify import Verify


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def describe_verify(verify: Verify) -> str:
    """One line on how a run drafts and verifies."""
    drafts = f"up to {verify.most}, as they pay," if verify.draft is None else str(verify.draft)
    more = "" if verify.weights == "full" else f", drafted with {verify.weights} weights"
    return f"{verify.mode}: {drafts} drafts a round{more}"


def rounds_rows(eps: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """Rows of verified decoding."""
    if eps is None:
        return []
    accepted = "" if eps["acceptance"] is None else f"{eps['acceptance']:.3f} of {eps['drafted']:,}"
    rows = [
        ("rounds, with drafts", f"{eps['rounds']:,}, {eps['rounds_drafted']:,}"),
        ("  drafts accepted", accepted),
        ("  tokens a round", _shown(eps["tokens_per_round"], ".2f")),
        ("  KL of a draft, mean", "" if eps["audit_kl_mean"] is None else f"{eps['audit_kl_mean']:.5f}"),
        (
            "  true mass skipped, mean",
            "" if eps["mass_skipped_true_mean"] is None else f"{eps['mass_skipped_true_mean']:.4f}",
        ),
        ("  fallbacks", ", ".join(f"{name} {count}" for name, count in eps["fallbacks"].items())),
    ]
    return [(name, "", value) for name, value in rows]


def rounds_json(dense: dict[str, Any], summary: dict[str, Any], config: EpsConfig, verify: Verify) -> dict[str, Any]:
    """The verified side of the last stdout line: what a dense side has, `dense`, and the rest."""
    return {
        **dense,
        "method": config.store.method,
        "policy": config.read.policy,
        "verify": verify.to_dict(),
        **{name: summary[name] for name in _ROUNDS_JSON},
    }


_ROUNDS_JSON = (
    "bytes_summary_read", "bytes_kv_draft", "bytes_kv_verify", "weight_passes", "bytes_weights", "rounds",
    "rounds_drafted", "tokens_per_round", "tokens_per_round_histogram", "drafted", "accepted", "acceptance",
    "acceptance_by_depth", "offered_by_depth", "audit_kl_mean", "audit_tv_mean", "mass_skipped_true_mean",
    "top2_margin_min", "rolled_back", "fallbacks",
)  # fmt: skip
