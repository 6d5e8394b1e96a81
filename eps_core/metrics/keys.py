"""Meanings of the keys of a JSONL of `eps-proto run --metrics`, of which docs/metrics.md is made."""

from typing import NamedTuple


class Key(NamedTuple):
    """One key. `kind` says how far to trust it: see KINDS."""

    unit: str
    kind: str
    meaning: str
    type: str = ""  # "": that of the record's field


KINDS = {
    "setting": "was given or chosen before the run",
    "count": "counted, exact",
    "time": "measured on the host's clock",
    "estimate": "computed from summaries; it may be too low or too high",
    "bound": "a proven upper limit of the truth",
    "truth": "computed with dense attention over the same cache",
}
GROUPS, BYTES, SHARE = "groups", "bytes", "share of the softmax"

RUN = {
    "type": Key("", "setting", "`run`.", "text"),
    "config": Key("", "setting", "All fields of `EpsConfig`.", "object"),
    "cache": Key("", "setting", "Shape of the KV cache: all fields of `CacheSpec`.", "object"),
    "backend": Key("", "setting", "Array library.", "text"),
    "device": Key("", "setting", "Device of the array library.", "text"),
    "model": Key("", "setting", "Folder or repository of the model.", "text"),
    "schema": Key("", "setting", "Version of these keys.", "int"),
    "versions": Key("", "setting", "Version by package.", "object"),
    "git_commit": Key("", "setting", "Commit of the checkout, `-dirty` where it was changed.", "text"),
    "platform": Key("", "setting", "Operating system.", "text"),
    "dtype": Key("", "setting", "Weight dtype.", "text"),
    "weights": Key("", "setting", "Weights of decode steps: `--weights`.", "text"),
    "prompt_tokens": Key("tokens", "count", "All prompts together.", "int"),
    "max_new_tokens": Key("tokens", "setting", "Limit of each prompt.", "int"),
    "sampling": Key("", "setting", "`temperature`, `top_p`, `seed`, `by`.", "object"),
    "kernels": Key("", "setting", "Kernels that ran.", "text"),
    "kernels_fault": Key("", "setting", "Reason why array operations run instead of kernels.", "text"),
    "device_name": Key("", "setting", "Name of the processor.", "text"),
    "min_context_cost": Key("ms", "time", "Times of one layer, for `--eps-min-context auto`.", "object"),
    "verify": Key("", "setting", "Settings of speculative decoding.", "object"),
    "keep": Key("", "setting", "Settings of the eviction.", "object"),
}

# of a step: of a round where it has no meaning of its own in ROUND
STEP = {
    "step": Key("", "count", "Steps, or rounds, of this decode before this one."),
    "sequences": Key("", "count", "Index of the sequence of each of `tokens`."),
    "tokens": Key("token ids", "count", "New tokens."),
    "lengths": Key("tokens", "count", "Tokens that each sequence attended. Further ones had ended already."),
    "pages_total": Key(GROUPS, "count", "All groups, over sequences, layers and KV heads."),
    "pages_visited": Key(GROUPS, "count", "Selected groups."),
    "pages_skipped": Key(GROUPS, "count", "`pages_total` less `pages_visited`."),
    "pages_always_selected": Key(GROUPS, "count", "Selected sink, recent and partial groups."),
    "pages_wanted": Key(GROUPS, "count", "`--eps-scope union`: sum of what each KV head alone would select."),
    "bytes_kv_read_est": Key(BYTES, "count", "K and V that attention read. Exact, despite the name."),
    "bytes_kv_dense": Key(BYTES, "count", "K and V that dense attention reads for the same tokens."),
    "bytes_kv_kept": Key(BYTES, "count", "K and V that the cache holds; less than dense only after evictions."),
    "rows_moved": Key("rows", "count", "Rows of a layer and head that evictions moved."),
    "units_freed": Key("units", "count", "Units of the pool that evictions gave back."),
    "bytes_summary_read": Key(BYTES, "count", "Summaries and codes read for scores and bounds."),
    "bytes_k_reread": Key(BYTES, "count", "K read again to finalize summaries."),
    "eps_prepass_ms": Key("ms", "time", "Score and select, all layers. null: the step was not timed by layer."),
    "attention_ms": Key("ms", "time", "Attention, all layers. null as above."),
    "decode_ms": Key("ms", "time", "Whole step. null: inside an engine that did not time it."),
    "skipped_mass_mean": Key(SHARE, "estimate", "Unread share, mean over sequences, layers and KV heads."),
    "skipped_mass_bound_max": Key(SHARE, "bound", "Unread share of any query head, the largest. null: no bounds."),
    "skipped_mass_true_max": Key(SHARE, "truth", "Unread share of any query head, the largest. Audited steps only."),
    "output_error_bound": Key("L2 norm", "bound", "Error of the output of any query head, the largest."),
    "extensions": Key("heads", "count", "`--eps-strict`: sequences, layers and KV heads that got more groups."),
    "pages_extended": Key(GROUPS, "count", "Groups that strict mode added, part of `pages_visited`."),
    "audited": Key("", "count", "A dense step ran beside this one. No other figure counts its reads."),
    "audit_kl": Key("nats", "truth", "KL of the dense next-token distribution to the sparse one, mean of sequences."),
    "audit_alarms": Key(
        "heads", "count", "Heads whose true unread share is above the bound, or far above the estimate."
    ),
    "bound_by_head": Key(SHARE, "bound", "[layer][KV head] unread share, the largest of the sequences."),
    "estimate_by_head": Key(SHARE, "estimate", "As above. null: neither bounds nor an audit."),
    "true_by_head": Key(SHARE, "truth", "As above. Audited steps only."),
    "fallbacks": Key("layer calls", "count", "Reason -> calls that attended densely."),
}

ROUND = {
    "drafted": Key("tokens", "count", "Drafts of each sequence, in the order of their first token."),
    "accepted": Key("tokens", "count", "Accepted drafts of each sequence."),
    "emitted": Key("tokens", "count", "New tokens of each sequence: accepted ones, and one of the dense pass."),
    "gamma": Key("tokens", "setting", "Drafts that were asked for."),
    "offered_by_depth": Key("tokens", "count", "Drafts at each depth whose predecessors were accepted."),
    "accepted_by_depth": Key("tokens", "count", "Accepted drafts at each depth."),
    "bytes_kv_draft": Key(BYTES, "count", "K and V read by draft steps."),
    "bytes_summary_draft": Key(BYTES, "count", "Summaries read by draft steps."),
    "bytes_kv_verify": Key(BYTES, "count", "K and V read by the dense pass; without drafts, by its dense step."),
    "bytes_kv_dense": Key(BYTES, "count", "K and V that dense decoding reads for the same tokens."),
    "weight_passes": Key("passes", "count", "Passes over all weights: draft steps and the dense pass."),
    "bytes_weights": Key(
        BYTES, "count", "Weights read by these passes, the drafter's in draft steps. null: inside an engine."
    ),
    "draft_ms": Key("ms", "time", "All draft steps."),
    "verify_ms": Key("ms", "time", "Dense pass; without drafts, its dense step."),
    "round_ms": Key("ms", "time", "Whole round."),
    "audit_kl": Key(
        "nats", "truth", "[depth] KL of the dense next-token distribution to the draft's, mean of sequences."
    ),
    "audit_tv": Key("", "truth", "[depth] Total variation between the two."),
    "skipped_mass_true_max": Key(SHARE, "truth", "[depth] Unread share of a draft, mean over layers and heads."),
    "top2_margin_min": Key("nats", "count", "Smallest margin of a new token over the runner-up."),
    "rolled_back": Key("slots", "count", "Cache slots of rejected drafts that were given back."),
    "fallbacks": Key("sequences", "count", "Reason -> sequences that drafted less, or nothing."),
}

# of a summary, beyond the sums of a step's and a round's counts
SUMMARY = {
    "steps": Key("steps", "count", "Decode steps.", "int"),
    "new_tokens": Key("tokens", "count", "New tokens of all sequences.", "int"),
    "prefill_ms": Key("ms", "time", "Prefill of all prompts.", "float"),
    "warm_up_steps": Key("steps", "count", "First steps of a decode that are in no time below.", "int"),
    "tokens_per_s": Key("tokens / s", "time", "Of the median step; of all rounds together.", "float"),
    **{
        f"{name}_p{percent}": Key("ms", "time", f"{percent}th percentile of {what}.", "float")
        for name, what in (
            ("decode_ms", "a step, or of a round's time a token"),
            ("prepass_ms", "score and select"),
            ("attention_ms", "attention"),
        )
        for percent in (50, 95, 99)
    },
    "selected_ratio": Key("", "count", "Selected groups over all groups.", "float"),
    "selected_ratio_by_layer_and_head": Key("", "count", "[layer][KV head] The same.", "list"),
    "union_amplification": Key("", "count", "Selected groups over `pages_wanted`.", "float"),
    "kv_ratio": Key("", "count", "K and V read over `bytes_kv_dense`.", "float"),
    "summary_ratio": Key("", "count", "Summaries read over `bytes_kv_dense`.", "float"),
    "bytes_ratio": Key(
        "", "count", "K, V and summaries read over `bytes_kv_dense`: the share of the dense bytes.", "float"
    ),
    "kept_ratio": Key("", "count", "`bytes_kv_kept` over `bytes_kv_dense`.", "float"),
    "skipped_mass_mean": Key(SHARE, "estimate", "Mean of the steps.", "float"),
    "skipped_mass_bound_max": Key(SHARE, "bound", "The largest of the steps.", "float"),
    "skipped_mass_true_max": Key(SHARE, "truth", "The largest of the audited steps.", "float"),
    "output_error_bound_max": Key("L2 norm", "bound", "The largest of the steps.", "float"),
    "extensions_by_layer_and_head": Key(
        "heads", "count", "[layer][KV head] Sequences that strict mode extended.", "list"
    ),
    "audits": Key("steps", "count", "Audited steps.", "int"),
    "audit_kl_mean": Key("nats", "truth", "Mean of the audited steps, or of all drafts.", "float"),
    "rounds": Key("rounds", "count", "Rounds of speculative decoding.", "int"),
    "rounds_drafted": Key("rounds", "count", "Rounds with drafts.", "int"),
    "tokens_per_round": Key("tokens", "count", "New tokens of a sequence in a round, mean.", "float"),
    "tokens_per_round_histogram": Key("rounds", "count", "New tokens of a sequence -> rounds.", "object"),
    "drafted": Key("tokens", "count", "Drafts.", "int"),
    "accepted": Key("tokens", "count", "Accepted drafts.", "int"),
    "acceptance": Key("", "count", "Accepted over drafted.", "float"),
    "acceptance_by_depth": Key("", "count", "[depth] Accepted over offered.", "list"),
    "offered_by_depth": Key("tokens", "count", "[depth] Drafts whose predecessors were accepted.", "list"),
    "bytes_weights": Key(BYTES, "count", "Weights read by all passes. null: inside an engine.", "int"),
    "draft_ratio": Key("", "count", "Bytes read by drafts over `bytes_kv_dense`.", "float"),
    "audit_tv_mean": Key("", "truth", "Total variation, mean of all drafts.", "float"),
    "skipped_mass_true_mean": Key(SHARE, "truth", "Mean of all drafts.", "float"),
    "top2_margin_min": Key("nats", "count", "Smallest of the rounds.", "float"),
    "fallbacks": Key("", "count", "Sum by reason.", "object"),
}
# what `eps-proto run` adds to its summary
COMPARED = {
    "prompt_tokens": RUN["prompt_tokens"],
    "tokens_equal": Key("", "count", "The tokens are those of the dense run.", "bool"),
    "dense": Key("", "count", "Summary of the dense run, with the same keys.", "object"),
    "kl_mean": Key("nats", "truth", "`--kl`: KL to dense decoding along its tokens, mean of the steps.", "float"),
    "kl_max": Key("nats", "truth", "`--kl`: the largest of the steps.", "float"),
    "top1_agreement": Key("", "truth", "`--kl`: share of the steps with the same most likely token.", "float"),
    "stored": Key("", "count", "`--cache-dir`: tokens and bytes loaded and saved, time to the first token.", "object"),
    "bytes_ratio_model": Key("", "count", "Engines: `bytes_ratio` of all layers, dense ones included.", "float"),
}
