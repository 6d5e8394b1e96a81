"""Names of settings, JSONL keys and head modes that changed, and how files with the old ones are read."""

from collections.abc import Mapping
from typing import Any

from eps_core.errors import ConfigError, require, shown

SCHEMA = 2

# settings of EpsConfig: old name -> name. Flags, variables EPS_* and keyword arguments still take the old names
SETTINGS = {
    "stages": "cascade",
    "refine": "rescore",
    "group_tokens": "group_size",
    "first_tokens": "num_sink_tokens",
    "last_tokens": "num_recent_tokens",
}
# settings that are gone, which older files have, and what EPS does in their place
REMOVED = dict.fromkeys(("correction_tokens", "tail_tokens"), "EPS has no skipped-mass correction (expected 0)")
REMOVED["mean_bits"] = "means of codes have 8 bits (expected 8)"
KEYS = SETTINGS | {
    "mass_skipped_est": "skipped_mass_mean",
    "mass_skipped_cert": "skipped_mass_bound_max",
    "mass_skipped_true": "skipped_mass_true_max",
    "mass_skipped_est_mean": "skipped_mass_mean",
    "mass_skipped_cert_mean": "skipped_mass_bound_mean",
    "mass_skipped_cert_max": "skipped_mass_bound_max",
    "mass_skipped_true_mean": "skipped_mass_true_mean",
    "mass_skipped_true_max": "skipped_mass_true_max",
    "output_error_cert": "output_error_bound",
    "output_error_cert_max": "output_error_bound_max",
    "cert_by_head": "bound_by_head",
    "est_by_head": "estimate_by_head",
    "pages_forced": "pages_always_selected",
    "forced_ratio": "always_selected_ratio",
    "pages_escalated": "pages_extended",
    "escalations": "extensions",
    "escalations_by_layer_and_head": "extensions_by_layer_and_head",
    "visit_ratio": "selected_ratio",
    "visit_ratio_by_layer_and_head": "selected_ratio_by_layer_and_head",
    "guards": "sink_recent",
    "certificate": "error_bound",
    "certified_share": "bounded_share",
    "certificate_violations": "bound_violations",
    "gated_exceeds_last_cache": "sparse_exceeds_last_cache",
    "gated_tokens_per_s": "eps_tokens_per_s",
}


def without_effect(name: str, given: Mapping[str, Any]) -> bool:
    """Return whether EPS would do the same without a setting that is gone, of all those that are given."""
    value = given.get(name)
    if name == "mean_bits":  # every method wrote it
        return value in (8, None) or given.get("method") != "rq"
    return not value


def without_removed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that EPS has no more. Raises ConfigError where one of them had an effect."""
    for name, instead in REMOVED.items():
        if not without_effect(name, given):
            raise ConfigError(f"{name} {shown(given[name])}: {instead}: leave it out, or use the version that wrote it")
    return {name: value for name, value in given.items() if name not in REMOVED}


def current_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under today's names, without those that are gone. Raises ConfigError where a setting is given
    under both names, and as `without_removed`."""
    given = without_removed(given)
    for old, name in SETTINGS.items():
        require(not (old in given and name in given), f"{old} is the former name of {name}: give one of them")
    return {SETTINGS.get(name, name): value for name, value in given.items()}


def current_modes(value: Any) -> Any:
    """Return head modes as tuples with `gate`, the former name of `sparse`, replaced."""
    if isinstance(value, list | tuple):
        return tuple(map(current_modes, value))
    return "sparse" if value == "gate" else value


def current(value: Any) -> Any:
    """Return a JSON value of any schema with today's keys at every depth but within `settings`: those are a KV format's
    own. Raises ConfigError as `without_removed`, but figures of means of other bits are read."""
    if isinstance(value, dict):
        named = without_removed({name: inner for name, inner in value.items() if name != "mean_bits"}).items()
        return {KEYS.get(name, name): inner if name == "settings" else current(inner) for name, inner in named}
    return [current(inner) for inner in value] if isinstance(value, list) else value
