"""`eps-proto`: run a model densely and gated side by side, and print what is usable here and what summaries cost."""

import io
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from eps_core import report, telemetry
from eps_core.config import DTYPE_BYTES, METHODS, POLICIES, SCOPES, ConfigError, EpsConfig, open_group_bytes
from eps_core.generate import Sampling
from eps_core.interface import BACKENDS, load_backend

DEMO_METHOD = "rq"
DEMO_NEW_TOKENS = 16
# flags that mean something under one policy only
_POLICY_FLAGS = {"eps_budget": "topk", "eps_tau": "share", "eps_epsilon": "mass", "eps_alpha": "threshold"}
_DEFAULT = EpsConfig()


def _options(*options: Callable) -> Callable:
    def decorate(function: Callable) -> Callable:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_summary_options = _options(
    click.option("--eps-dim", type=int, help="m of jl (default 8), l of fd (2), k of moments (1)."),
    click.option(
        "--eps-bits", type=int, default=_DEFAULT.bits, show_default=True, help="Bits of one rq code: 1, 2, 4 or 8."
    ),
    click.option(
        "--eps-group-tokens",
        type=int,
        metavar="N",
        help="Tokens of a group, up to 256; divides the page or is a multiple of it.",
    ),
    click.option("--eps-group-blocks", type=int, metavar="G", help="The same in pages.  [default: each method's best]"),
    click.option("--block-size", type=int, default=_DEFAULT.block_size, show_default=True, help="Tokens of a page."),
)

_selection_options = _options(
    click.option(
        "--eps-method",
        type=click.Choice(METHODS),
        help=f"Summary of a group of keys.  [default: off; {DEMO_METHOD} without --model]",
    ),
    click.option("--eps-rq-bounds", is_flag=True, help="rq also stores what its bounds need (6 bytes a group)."),
    click.option("--eps-policy", type=click.Choice(POLICIES), default=_DEFAULT.policy, show_default=True),
    click.option(
        "--eps-budget", type=float, default=_DEFAULT.budget, show_default=True,
        help="topk: share of the context that is read (up to 1), or a number of tokens.",
    ),
    click.option("--eps-tau", type=float, help="share: least estimated share of the softmax worth a visit."),
    click.option(
        "--eps-epsilon", type=float, default=_DEFAULT.epsilon, show_default=True,
        help="mass: most estimated share of the softmax left unread.",
    ),
    click.option(
        "--eps-alpha", type=float, default=_DEFAULT.alpha, show_default=True,
        help="threshold: a group is skipped below T / alpha; higher visits more.",
    ),
    click.option(
        "--eps-top-pages", type=int, metavar="N", help="In groups: topk budget, threshold heap, cap on share and mass."
    ),
    click.option(
        "--eps-first-tokens", type=int, default=_DEFAULT.first_tokens, show_default=True, help="Always visited."
    ),
    click.option(
        "--eps-last-tokens", type=int, default=_DEFAULT.last_tokens, show_default=True, help="Always visited."
    ),
    click.option("--eps-first-n", type=int, metavar="N", help="--eps-first-tokens in groups."),
    click.option("--eps-last-n", type=int, metavar="N", help="--eps-last-tokens in groups."),
    click.option(
        "--eps-scope", type=click.Choice(SCOPES), default=_DEFAULT.scope, show_default=True,
        help="A list of groups for each kv head, or the union of them for all heads.",
    ),
    click.option("--eps-seed", type=int, default=_DEFAULT.seed, show_default=True, help="Of projections and signs."),
    click.option(
        "--eps-min-context", type=int, default=_DEFAULT.min_context, show_default=True, help="Dense below N tokens."
    ),
)  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False)
@click.version_option(package_name="eps", prog_name="eps-proto")
def cli() -> None:
    """Decode from a long context while reading a fraction of its KV cache. `eps-proto run` tries it on a demo model."""


@cli.command("run")
@click.option("--backend", type=click.Choice(("auto", *BACKENDS)), default="auto", show_default=True)
@click.option("--device", type=click.Choice(("auto", "cpu", "cuda", "mps")), default="auto", show_default=True)
@click.option(
    "--model", type=click.Path(path_type=Path), metavar="DIR", help="Hugging Face directory.  [default: demo]"
)
@click.option(
    "--prompt", metavar="TEXT", help="Text to continue.  [default, without --model: a 4,096-token needle task]"
)
@click.option("--prompt-file", type=click.Path(path_type=Path), metavar="FILE", help="The same from a UTF-8 file.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1),
    help=f"[default: 32; {DEMO_NEW_TOKENS} for the built-in prompt, whose answer is 5 digits and a full stop]",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(("auto", *DTYPE_BYTES)), default="auto", show_default=True,
    help="Of the weights; auto: float32 on a CPU, else as stored.",
)  # fmt: skip
@click.option("--kv-dtype", type=click.Choice(tuple(DTYPE_BYTES)), help="Of the KV cache.  [default: as --dtype]")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="With a temperature: nucleus to draw from.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of drawing tokens.")
@click.option("--prefill-chunk", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens at a time.")
@click.option(
    "--pool-tokens", type=click.IntRange(min=1), metavar="N", help="Cache size.  [default: what the run needs]"
)
@click.option("--stop/--no-stop", default=True, show_default=True, help="End at the model's end-of-text tokens.")
@click.option("--no-baseline", is_flag=True, help="Skip the dense run.")
@click.option("--kl", is_flag=True, help="Also measure KL and top-1 agreement along the dense run's tokens.")
@click.option("--metrics", type=click.Path(path_type=Path), metavar="FILE", help="Write JSONL, one line a decode step.")
@click.option("--csv", type=click.Path(path_type=Path), metavar="FILE", help="Write the same steps as CSV.")
@_selection_options
@_summary_options
@click.pass_context
def run_command(ctx: click.Context, /, **flags: Any) -> None:
    """Decode a prompt densely, then with EPS, and compare.

    Without --model this runs the demo model on a built-in needle prompt with --eps-method rq; with --model EPS is off
    until --eps-method names a method. --eps-method off is the rollback: other --eps flags then mean nothing.

    Prints the text as it comes and a table; the last line of stdout is one JSON object. --metrics and --csv hold the
    EPS run's steps, or the dense run's where EPS is off.
    """
    given = {name for name in flags if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    config = _config(flags, given)
    if flags["no_baseline"] and not config.enabled:
        raise click.UsageError("--no-baseline with EPS off leaves nothing to run: drop it or choose an --eps-method")
    if flags["kl"] and (flags["no_baseline"] or not config.enabled):
        raise click.UsageError("--kl compares EPS with the dense run: it needs an --eps-method and no --no-baseline")
    if "top_p" in given and not flags["temperature"]:
        raise click.UsageError("--top-p means nothing to greedy decoding: add --temperature")
    # late: `eps-proto info` and --help must work where a model cannot be loaded
    from eps_core.run import RunRequest, run

    prompt = _prompt(flags)
    request = RunRequest(
        config=config,
        sampling=Sampling(flags["temperature"], flags["top_p"], flags["seed"]),
        backend=flags["backend"],
        device=flags["device"],
        model=flags["model"],
        prompt=prompt,
        max_new_tokens=flags["max_new_tokens"] or (DEMO_NEW_TOKENS if prompt is None else 32),
        dtype=flags["dtype"],
        kv_dtype=flags["kv_dtype"] or "auto",
        prefill_chunk=flags["prefill_chunk"],
        pool_tokens=flags["pool_tokens"],
        baseline=not flags["no_baseline"],
        kl=flags["kl"],
        stop=flags["stop"],
        method_is_default=flags["eps_method"] is None,
        metrics=flags["metrics"],
        csv=flags["csv"],
    )
    result = run(request, sys.stdout)
    click.echo(telemetry.to_json(result))


def _config(flags: dict[str, Any], given: set[str]) -> EpsConfig:
    """The flags as an EpsConfig; flags that contradict each other are refused, unless EPS is turned off outright."""
    method = flags["eps_method"]
    eps_given = sorted(name for name in given if name.startswith("eps_") and name != "eps_method")
    if method is None:
        method = DEMO_METHOD if flags["model"] is None else "off"
        if method == "off" and eps_given:
            raise click.UsageError(f"{_flag(eps_given[0])} means nothing while EPS is off: add --eps-method")
    if method == "off":
        return EpsConfig(block_size=flags["block_size"])
    for name, policy in _POLICY_FLAGS.items():
        if name in given and flags["eps_policy"] != policy:
            raise click.UsageError(f"{_flag(name)} belongs to --eps-policy {policy}: drop it or choose that policy")
    if "eps_budget" in given and "eps_top_pages" in given:
        raise click.UsageError("--eps-budget and --eps-top-pages both set the budget of topk: give one of them")
    if "eps_bits" in given and method != "rq":
        raise click.UsageError("--eps-bits belongs to --eps-method rq: drop it or choose that method")
    config = EpsConfig(
        method=method,
        dim=flags["eps_dim"],
        bits=flags["eps_bits"],
        rq_bounds=flags["eps_rq_bounds"],
        group_tokens=flags["eps_group_tokens"],
        group_blocks=flags["eps_group_blocks"],
        policy=flags["eps_policy"],
        budget=flags["eps_budget"],
        tau=flags["eps_tau"],
        epsilon=flags["eps_epsilon"],
        alpha=flags["eps_alpha"],
        top_pages=flags["eps_top_pages"],
        first_tokens=flags["eps_first_tokens"],
        last_tokens=flags["eps_last_tokens"],
        scope=flags["eps_scope"],
        seed=flags["eps_seed"],
        min_context=flags["eps_min_context"],
        block_size=flags["block_size"],
    )
    for end in ("first", "last"):
        groups = flags[f"eps_{end}_n"]
        if groups is None:
            continue
        if f"eps_{end}_tokens" in given:
            raise click.UsageError(f"--eps-{end}-n and --eps-{end}-tokens say the same thing twice: give one of them")
        if groups < 0:
            raise click.UsageError(f"--eps-{end}-n {groups} is negative: use 0 or more groups")
        config = replace(config, **{f"{end}_tokens": groups * config.S})
    return config


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _prompt(flags: dict[str, Any]) -> str | None:
    """The prompt's text; None: the demo's needle document."""
    path: Path | None = flags["prompt_file"]
    if flags["prompt"] is not None and path is not None:
        raise click.UsageError("--prompt and --prompt-file say two things: give one of them")
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"prompt file {path} cannot be read ({error.strerror}): give a text file") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"prompt file {path} is not UTF-8 at byte {error.start}: convert it") from error
    elif flags["prompt"] is None and flags["model"] is None:
        return None
    elif flags["prompt"] is None:
        raise click.UsageError("--model needs a prompt: add --prompt or --prompt-file")
    else:
        text = flags["prompt"]
    if not text:
        raise ConfigError("the prompt is empty: give at least one character")
    return text


@cli.command("info")
@click.option("--model", type=click.Path(path_type=Path), metavar="DIR", help="Take the shape from its config.json.")
@click.option("--layers", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--kv-heads", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--head-dim", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--context", type=click.IntRange(min=1), help="Tokens.  [default: 65536, or the model's context]")
@_summary_options
@click.pass_context
def info_command(ctx: click.Context, /, **flags: Any) -> None:
    """Print devices, versions, usable backends, and the memory that summaries take for a model shape.

    The last line of stdout is one JSON object with the same numbers.
    """
    given = {name for name in flags if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    layers, kv_heads, head_dim = flags["layers"], flags["kv_heads"], flags["head_dim"]
    context = flags["context"] or 65536
    if flags["model"] is not None:
        if given & {"layers", "kv_heads", "head_dim"}:
            raise click.UsageError("--model already says the shape: drop --layers, --kv-heads and --head-dim")
        from eps_core.model import read_spec

        spec = read_spec(flags["model"])
        layers, kv_heads, head_dim = spec.num_layers, spec.num_kv_heads, spec.head_dim
        context = flags["context"] or spec.max_context
    if flags["eps_group_tokens"] is not None and flags["eps_group_blocks"] is not None:
        raise click.UsageError("--eps-group-tokens and --eps-group-blocks say the same thing twice: give one of them")
    rows = report.memory_rows(
        layers, kv_heads, head_dim, context, flags["block_size"], flags["eps_dim"], flags["eps_bits"],
        flags["eps_group_tokens"], flags["eps_group_blocks"],
    )  # fmt: skip
    backends = {name: _backend_status(name) for name in BACKENDS}
    click.echo(f"eps {telemetry.package_version() or '(not installed)'}, Python {platform.python_version()}")
    for name, status in backends.items():
        if status["usable"]:
            versions = ", ".join(f"{package} {version}" for package, version in status["versions"].items())
            click.echo(f"backend {name:5} usable on {', '.join(status['devices'])} ({versions})")
        else:
            click.echo(f"backend {name:5} not usable: {status['why_not']}")
    dense = report.kv_bytes(layers, kv_heads, head_dim, context, "bfloat16")
    click.echo(
        f"\n{layers} layers x {kv_heads} kv heads of {head_dim} x {context:,} tokens: "
        f"bfloat16 KV cache {dense / report.MIB:,.0f} MiB; summaries of one sequence:\n"
    )
    click.echo(report.memory_table(rows))
    statistics = open_group_bytes(layers, kv_heads, head_dim)
    click.echo(
        f"\nbox and meanstd also keep {statistics / report.MIB:,.1f} MiB of running statistics for each sequence in "
        "mid-group, so that a growing group is never read back."
    )
    shape = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "context": context, "kv_bytes": dense}
    click.echo(telemetry.to_json({"backends": backends, "shape": shape, "summaries": rows}))


def _backend_status(name: str) -> dict[str, Any]:
    try:
        backend = load_backend(name)
        return {"usable": True, "devices": backend.devices(), "versions": backend.versions(), "why_not": None}
    except ConfigError as error:
        return {"usable": False, "devices": [], "versions": {}, "why_not": str(error)}


def _fail(message: str) -> NoReturn:
    click.echo("error: " + " ".join(message.split()), err=True)
    sys.exit(2)


def main() -> None:
    """Entry point: every mistake of the user's is one line on stderr and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the run
    try:
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # whoever read us has gone; Python's own flush at exit must not complain either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except click.UsageError as error:
        _fail(f"{error.format_message()} ({error.ctx.command_path if error.ctx else 'eps-proto'} --help)")
    except click.ClickException as error:
        _fail(error.format_message())
    except ConfigError as error:
        _fail(str(error))
    except OSError as error:
        _fail(str(error))
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
