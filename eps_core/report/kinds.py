"""Kinds of the fields of a results line: one of another kind is left out before anything is drawn of it."""

from typing import Annotated, Any

from eps_core.io.records import Between, Count, Name, Nats, Ratio, Share, convert

Line = dict[str, Any]

Setting = Annotated[float, Between(0, 1e12)]  # a share, or a number of tokens or groups
Milliseconds = Annotated[float, Between(0, 1e12)]
Points = tuple[tuple[float | None, float | None], ...]

_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("type", "method", "policy", "scope", "heads", "device", "model", "backend", "task"), Name),
    **dict.fromkeys(
        (
            "context_tokens", "prompt_tokens", "batch", "index", "num_needles", "num_samples", "needles_answered",
            "needles_dense", "documents", "documents_equal", "dim", "bits", "group_size", "mean_tokens",
            "bound_bits", "top_pages", "last_n", "first_n",
        ),
        Count,
    ),
    "lengths": tuple[Count, ...],
    **dict.fromkeys(
        ("alpha", "budget", "budget_floor", "byte_budget", "epsilon", "tau", "rescore", "num_recent_tokens"), Setting
    ),
    **dict.fromkeys(
        (
            "bytes_ratio", "selected_ratio", "always_selected_ratio", "acceptance",
            "temperature", "draft_ratio", "tokens_per_round", "draft_kl_mean", "skipped_mass_bound_max",
            "skipped_mass_true_max",
        ),
        Ratio,
    ),
    **dict.fromkeys(("kl_mean", "kl_max"), Nats),
    **{
        f"{clock}_ms_p{part}": Milliseconds
        for clock in ("decode", "dense_decode", "prepass", "attention")
        for part in (50, 95)
    },
    **dict.fromkeys(("setting", "config", "request", "verified"), dict[str, Any]),
    "skipped": Annotated[str, Between(0, 10_000)],
    "strict": bool,
    "top1_agreement": Share,
    "mass_pairs": Points,
    "selected_ratio_by_layer_and_head": tuple[tuple[Share, ...], ...],
    "sink_recent": tuple[Count, Count],
    "cascade": tuple[Share, ...] | Name | None,  # in a setting as it was asked for
}  # fmt: skip
Score = Annotated[float, Between(-1e6, 1e6)]
_OF_TYPE: dict[str, dict[str, Any]] = {
    "summary": {"dense": dict[str, Any]},
    "round": {"skipped_mass_true_max": tuple[Ratio, ...]},  # by depth
    "task": {
        **dict.fromkeys(("dense", "eps", "oracle", "eps_minus_dense"), Score),
        "eps_minus_dense_interval": tuple[Score, Score],
        "num_changed": Count,
    },
    "text": {
        **dict.fromkeys(("num_documents", "text_steps"), Count),
        **dict.fromkeys(("eps_kl", "eps_kl_max", "oracle_kl"), Nats),
        "eps_kl_interval": tuple[Nats, Nats],
        "eps_top1_agreement": Share,
    },
}


def clean(line: Line) -> tuple[Line, list[str]]:
    """(the line with null in place of what is not of its field's kind, what was wrong)."""
    kind = line.get("type")
    own = _OF_TYPE.get(kind, {}) if isinstance(kind, str) else {}
    found: Line = {}
    faults: list[str] = []
    for name, value in line.items():
        if value is not None and (wanted := own.get(name, _FIELDS.get(name))) is not None:
            try:
                convert(value, wanted)
            except ValueError as error:
                faults.append(f"{name} {error}")
                value = None
        if isinstance(value, dict) and name in ("setting", "config", "dense"):
            value, inner = clean(value)
            faults += [f"{name}.{fault}" for fault in inner]
        found[name] = value
    return found, faults
