"""`eps-proto capture`, `replay` and `calibrate`: look at one's own checkpoint before EPS reads it sparsely."""

import sys
from contextlib import nullcontext
from typing import Any

import click

from eps_core.cli.help import FILE, INPUT, MEASURING, METHOD, OUTPUT, OUTPUT_FILE, SELECTION, command, option
from eps_core.cli.numbers import COUNT, SHARE, TOKENS, ListOf, Real, SizedMethod
from eps_core.cli.options import (
    DEMO_METHOD,
    config_of,
    flag,
    given_flags,
    method_option,
    selection_options,
    summary_options,
    summary_settings,
)
from eps_core.cli.source import backend_option, device_option, dtype_option, kv_dtype_option, model_option
from eps_core.config.cache import EVALUATION_METHODS, METHODS, sized_method
from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError
from eps_core.evaluation.runner import DEFAULT_CONTEXT
from eps_core.io import outputs
from eps_core.metrics import terminal
from eps_core.models.config import DEMO_MODEL
from eps_core.summaries.table import method_spec

text_option = option(
    "--text", heading=INPUT, type=FILE, metavar="FILE",
    help="UTF-8 text file to decode along.  [default: the shipped corpus, sources of Python's library]",
)  # fmt: skip
context_option = option(
    "--context", heading=INPUT, type=TOKENS,
    help=f"Prompt length in tokens.  [default: {DEFAULT_CONTEXT}, or as many as model and text hold]",
)  # fmt: skip
_STEPS: dict[str, Any] = {"heading": INPUT, "type": TOKENS, "default": 32}
_DEFAULT_BUDGETS = "0.05,0.1,0.2,0.3"
_METHODS = (*METHODS[1:], *EVALUATION_METHODS)  # that replay takes
# flags that only codes have, as they are when not given
_CODE_FLAGS: dict[str, Any] = {
    "eps_rq_bounds": False,
    **dict.fromkeys(("eps_mean_tokens", "eps_cascade", "eps_rescore")),
}


@command(
    "capture",
    examples={
        "eps-proto capture -o c.safetensors": "the demo model along the shipped text",
        "eps-proto capture --model DIR --text long.txt --layers 0,1 -o c.safetensors": "two layers of yours",
        "eps-proto replay c.safetensors": "score budgets on it",
    },
)
@model_option
@text_option
@context_option
@option("--steps", **_STEPS, help="Number of decoded tokens.")
@option("--layers", heading=INPUT, type=ListOf(COUNT), help="Layer indices, such as 0,3.  [default: all]")
@backend_option
@device_option
@dtype_option
@kv_dtype_option
@option("-o", "--output", heading=OUTPUT, type=OUTPUT_FILE, required=True, metavar="FILE.safetensors")
@method_option("off")
@selection_options
@summary_options
@click.pass_context
def capture_command(ctx: click.Context, /, **flags: Any) -> None:
    """Save the queries, keys and values of a real decode, so that `eps-proto replay` can score any method on them.

    The text's first --context tokens are prefilled densely and --steps tokens of it are decoded one by one: densely, or
    sparse with a --method (off by default, also for the demo model). Nothing else of EPS is needed to try it on
    your own checkpoint: capture some layers, replay. Keys are saved as EPS codes them, balanced.

    The file takes, for each layer, 2 (context + steps) kv-heads head-dim bytes-of-kv-dtype + 4 steps heads head-dim
    bytes. One layer of 8 kv heads of 128 at 131,072 tokens in bfloat16 is 512 MiB, so 32 layers are 16 GiB: choose a
    few --layers. What does not fit the disk is refused before the model is loaded. The decode itself holds the weights
    and the KV cache of all layers; on the host, one layer of the cache at a time is in memory while the file is
    written.
    """
    from eps_core.evaluation.capture import CaptureRequest, capture

    _check_paths(flags)
    # behind the length of a header
    outputs.check_start("-o", flags["output"], b'{"__metadata__": {"eps_capture', "capture", skipped=8)
    # a capture is dense unless a method is named, with the demo model too
    given = given_flags(ctx, flags)
    stray = sorted(name for name in given if name.startswith("eps_"))
    if flags["eps_method"] is None and stray:
        raise click.UsageError(f"{flag(stray[0])} means nothing to a dense capture: add --method")
    config = config_of(flags | {"eps_method": flags["eps_method"] or "off"}, given)
    result = capture(CaptureRequest(config=config, layers=flags["layers"], **_source(flags)))
    click.echo(
        f"{result['capture']}: {len(result['layers'])} of {result['num_layers']} layers of {result['model']}, "
        f"{result['context_tokens']:,} + {result['num_steps']:,} tokens, {result['bytes'] / terminal.MIB:,.1f} MiB; "
        f"decode {terminal.describe(EpsConfig.of(**result['config'])) if config.cache_config.enabled else 'dense'}"
    )
    click.echo(outputs.to_json(result))


def _source(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that requests to capture and to calibrate share."""
    same = {name: flags[name] for name in ("output", "model", "text", "backend", "device", "dtype")}
    lengths = {"context_tokens": flags["context"], "num_steps": flags["steps"]}
    return {**same, **lengths, "kv_dtype": flags["kv_dtype"] or "auto"}


def _check_paths(flags: dict[str, Any]) -> None:
    read = {"--text": flags["text"], "--model": flags["model"] or DEMO_MODEL}
    outputs.check({"-o": flags["output"]}, read | {"--eps-head-policy": flags.get("eps_head_policy")})


@command(
    "replay",
    examples={
        "eps-proto replay c.safetensors": "rq at four budgets",
        "eps-proto replay c.safetensors --method rq,box@16,oracle --budgets 0.05,0.1": "methods side by side",
        "eps-proto replay c.safetensors --layers 0,1 -o heads.jsonl": "figures of every head",
    },
)
@click.argument("captures", nargs=-1, required=True, type=FILE, metavar="CAPTURE...")
@option(
    "--method", "methods", also=["--methods", "--eps-method"], heading=METHOD, type=ListOf(SizedMethod(_METHODS)),
    default=DEMO_METHOD,
    help="Summary methods; @N sets the group size: rq@2,box@16,oracle. Each takes the --eps flags that apply to it.",
)  # fmt: skip
@option(
    "--budgets", heading=SELECTION, type=ListOf(Real()), metavar="LIST",
    help=f"Budgets of policy topk.  [default: {_DEFAULT_BUDGETS}]",
)  # fmt: skip
@option(
    "--match-error", heading=MEASURING, type=Real(0, above=True), default=0.05,
    help="Output error at which the methods' bytes are compared.",
)  # fmt: skip
@option(
    "--layers", heading=INPUT, type=ListOf(COUNT), help="Layer indices, such as 0,3.  [default: all of the capture]"
)
@backend_option
@device_option
@option(
    "-o", "--output", also=["--jsonl"], heading=OUTPUT, type=OUTPUT_FILE, metavar="FILE",
    help="JSONL output file with all figures, by head too.",
)  # fmt: skip
@selection_options
@summary_options
@click.pass_context
def replay_command(ctx: click.Context, /, **flags: Any) -> None:
    """Score methods and policies on captures: what they read, what they miss, and whether their bounds hold.

    Every step is compared with float64 attention over the whole capture. Prints one table; the last line of stdout is
    one JSON object. Nothing in either is a time: two replays give the same bytes. Memory: the cache of one layer, and
    that layer's K and V in float64.

    Keys are the capture's, balanced as codes want them. A run of a method without codes has the model's own, and its
    figures may differ from these.

    \b
    bytes       K, V and summaries read, over dense
    recall      true share of the softmax in the groups read
    at 12.5 %   the same of the best eighth by estimate, of groups that are not always selected
    false       skipped groups whose true share exceeds --eps-epsilon, or that are among the true best
    error       |out - dense out| / |dense out|
    matched     bytes at the output error of --match-error, between budgets
    skip at .1  fraction of groups that may stay unread with an error bound of 0.1, and if all masses were known
    bounds      violations of the lower and upper bounds, of all checks
    union       groups that any kv head of a layer wants, over the mean of what each wants
    """
    path = flags["output"]
    outputs.check({"-o": path}, {"capture": flags["captures"], "--eps-head-policy": flags["eps_head_policy"]})
    outputs.check_distinct("capture", flags["captures"])
    outputs.check_start("-o", path, b'{"type": "run", "capture": ', "JSONL of replay")
    with nullcontext() if path is None else outputs.Output(path, "-o") as output:
        _replay(ctx, flags, output)


def _replay(ctx: click.Context, flags: dict[str, Any], output: outputs.Output | None) -> None:
    from eps_core.decode.heads import load_policy
    from eps_core.evaluation.capture import open_capture
    from eps_core.evaluation.merits import bytes_at_error
    from eps_core.evaluation.replay import check_alike, combine, replay_many
    from eps_core.load import backend_name, load_backend

    if (flags["eps_heads"] == "retrieval") != (flags["eps_head_policy"] is not None):
        raise click.UsageError("--eps-heads retrieval and --eps-head-policy FILE need each other: give both or none")
    policy = None if flags["eps_head_policy"] is None else load_policy(flags["eps_head_policy"])
    # a capture names its model: the policy is checked against that, not against a directory
    configs = _configs(ctx, flags | {"eps_heads": "all", "eps_head_policy": None})
    if policy is not None:
        configs = [config.replace(head_modes=policy.head_modes) for config in configs]
    captures = [open_capture(path) for path in flags["captures"]]
    check_alike(captures, flags["layers"])
    for capture in captures:
        unknown = sorted(set(flags["layers"] or ()) - set(capture.info.layers))
        if unknown:
            held = ", ".join(map(str, capture.info.layers))
            raise ConfigError(f"layer {unknown[0]} is not in capture {capture.path}, which holds {held}")
        if policy is not None and policy.fingerprint != capture.info.fingerprint:
            raise ConfigError(
                f"the head policy was made for another model ({policy.model}) than capture {capture.path} "
                f"({capture.info.model}): calibrate that model"
            )
    backend = load_backend(flags["backend"])
    results = [replay_many(capture, configs, backend, flags["device"], flags["layers"]) for capture in captures]
    rows = [combine([result[i].summary() for result in results]) for i in range(len(configs))]
    configs = [result.config for result in results[0]]  # as the device reads
    names = [_name(config) for config in configs]
    points: dict[str, list[tuple[float, float]]] = {}
    for name, row in zip(names, rows, strict=True):
        points.setdefault(name, []).append((row["bytes_ratio"], row["output_error"]))
    for name, row in zip(names, rows, strict=True):
        row["bytes_at_matched_error"] = bytes_at_error(points[name], flags["match_error"])
    if output is not None:
        with outputs.JsonlWriter(output) as writer:
            for capture, found in zip(captures, results, strict=True):
                run = {"type": "run", "capture": capture.path.name, **vars(capture.info)}
                writer.write(run | {"replay_backend": backend_name(backend), "replay_versions": backend.versions()})
                for config, result in zip(configs, found, strict=True):
                    writer.write({"type": "replay", "config": config.to_dict(), **result.summary()})
                    method, budget = config.cache_config.method, config.selection_config.budget
                    for head in result.head_rows():
                        writer.write({"type": "head", "method": method, "budget": budget, **head})
    click.echo(_table(names, rows))
    captured = [str(path) for path in flags["captures"]]
    line = {"captures": captured, "backend": backend_name(backend), "match_error": flags["match_error"]}
    click.echo(outputs.to_json({**line, "rows": rows}))


def _configs(ctx: click.Context, flags: dict[str, Any]) -> list[EpsConfig]:
    """Every method at every budget."""
    given = given_flags(ctx, flags)
    methods = [sized_method(name, _METHODS) for name in flags["methods"]]
    sizes = sorted(given & {"eps_group_size", "eps_group_blocks"})
    if sizes and any(size is not None for _, size in methods):
        raise click.UsageError(f"--method gives group sizes, as in rq@2, and {flag(sizes[0])} does, too: drop one")
    # a sweep of budgets is what compares methods, whatever a method's own policy is
    policy = flags["eps_policy"] if "eps_policy" in given else "topk"
    if flags["budgets"] is not None and (policy != "topk" or "eps_top_pages" in given):
        raise click.UsageError("--budgets belongs to --eps-policy topk without --eps-top-pages: drop it")
    if flags["budgets"] is not None and "eps_budget" in given:
        raise click.UsageError("--budgets and --eps-budget both set the budget: give one of them")
    budgets = flags["budgets"]
    if budgets is None and policy == "topk" and not given & {"eps_budget", "eps_top_pages"}:
        budgets = tuple(map(float, _DEFAULT_BUDGETS.split(",")))
    configs = []
    for method, size in methods:
        own: dict[str, Any] = {"eps_method": method, "eps_policy": policy}
        if size is not None:
            own["eps_group_size"] = size
        mine = given - {"eps_epsilon"}  # here it also defines a false skip, whatever the policy
        if len(methods) > 1:  # each takes the flags that are its own
            if not method_spec(method).coded:
                mine -= set(_CODE_FLAGS)
                own |= _CODE_FLAGS
            if method_spec(method).dim is None:
                own["eps_dim"] = None
        config = config_of(flags | own, mine)
        configs += [config] if budgets is None else [config.replace(budget=budget) for budget in budgets]
    return configs


def _name(config: EpsConfig) -> str:
    cache, read = config.cache_config, config.selection_config
    name = f"{cache.method}@{cache.S}"
    if cache.method_spec.coded:
        name += f" mean {cache.mean_tokens}"
        name += f" cascade {','.join(map(str, read.cascade))}" if read.cascade else ""
        name += f" rescore {read.rescore:g}" if read.rescore else ""
        name += " bounds" if cache.rq_bounds else ""
    return name + (f" dim {cache.dim}" if cache.dim is not None else "")


def _table(names: list[str], rows: list[dict[str, Any]]) -> str:
    def number(value: float | None, form: str = ".3f") -> str:
        return "-" if value is None else format(value, form)

    cells = []
    for name, row in zip(names, rows, strict=True):
        wrong = row["lower_violations"] + row["upper_violations"]
        cells.append(
            [
                name,
                row["policy"] if row["budget"] is None else f"{row['budget']:g}",
                number(row["bytes_ratio"]),
                number(row["recall"]),
                number(row["recall_at_0.125"]),
                number(row["false_skip_rate"], ".4f"),
                number(row["output_error"], ".4f"),
                number(row["bytes_at_matched_error"]),
                f"{number(row['certified_skip_0.1'], '.2f')} / {number(row['oracle_skip_0.1'], '.2f')}",
                f"{wrong:,} / {row['bound_checks']:,}" if row["bound_checks"] else "-",
                number(row["union_amplification"], ".2f"),
            ]
        )
    header = ["method", "budget", "bytes", "recall", "at 12.5 %", "false", "error", "matched", "skip at .1", "bounds"]
    return terminal.table(cells, [*header, "union"])


@command(
    "calibrate",
    examples={
        "eps-proto calibrate -o policy.json": "the demo model along the shipped text",
        "eps-proto calibrate --model DIR --text long.txt -o policy.json": "yours",
        "eps-proto run --method rq --eps-heads retrieval --eps-head-policy policy.json": "sparse where heads retrieve",
    },
)
@model_option
@text_option
@context_option
@option("--steps", **_STEPS, help="Number of tokens to average over.")
@option(
    "--method", "eps_method", also=["--eps-method"], heading=METHOD, type=click.Choice(METHODS[1:]),
    default=DEMO_METHOD,
    help="Method whose break-even context is measured, at its default budget.",
)  # fmt: skip
@summary_options
@option("--sink-tokens", heading=MEASURING, type=COUNT, default=16, help="Sink tokens of a streaming head.")
@option(
    "--recent-tokens", heading=MEASURING, type=COUNT, default=128, help="Recent window of a streaming head, in tokens."
)
@option(
    "--streaming-share", heading=MEASURING, type=SHARE, default=0.05,
    help="Largest share of its attention mass that a streaming head has outside sink and recent tokens.",
)  # fmt: skip
@option(
    "--dense-fraction", heading=MEASURING, type=SHARE, default=0.5,
    help="Share of the groups above which a layer that needs them for 99 % of its mass stays dense.",
)  # fmt: skip
@backend_option
@device_option
@dtype_option
@kv_dtype_option
@option("-o", "--output", heading=OUTPUT, type=OUTPUT_FILE, required=True, metavar="POLICY.json")
@click.pass_context
def calibrate_command(ctx: click.Context, /, **flags: Any) -> None:
    """Find out how sparse a model's attention is, which kv heads retrieve, and from which context sparse attention
    pays.

    The text is prefilled and decoded densely. For every layer and kv head: the share of the softmax that the best
    groups hold, if their masses were known; whether it is a retrieval head or looks at the first and last tokens alone
    (streaming); which layers should stay dense. All of it describes this text at this context: take one like your own.

    Then the same text is decoded sparse, at the context and its halves: the method pays where the mean KL is at most
    0.01 and a layer takes less time than a dense one.

    Prints two tables; the last line of stdout is one JSON object. The policy names its model and is refused for
    another.
    """
    from eps_core.evaluation.calibrate import CalibrateRequest, calibrate

    _check_paths(flags)
    outputs.check_start("-o", flags["output"], b'{\n "format_version"', "head policy")
    request = CalibrateRequest(
        config=EpsConfig.of(method=flags["eps_method"], **summary_settings(flags)),
        **{name: flags[name] for name in ("sink_tokens", "recent_tokens", "streaming_share", "dense_fraction")},
        **_source(flags),
    )
    click.echo(outputs.to_json(calibrate(request, sys.stdout)))
