"""`eps-proto`: run a model densely and sparse side by side, and print what is usable here and what summaries cost."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from eps_core.cli.balance import balance_command
from eps_core.cli.bench import bench_command
from eps_core.cli.captures import calibrate_command, capture_command, replay_command
from eps_core.cli.engines import check_engine, engine_option, serve_command
from eps_core.cli.evaluate import evaluate_command
from eps_core.cli.eviction import eviction_of, eviction_options
from eps_core.cli.help import CHECKS, DECODING, FILE, INPUT, OUTPUT, OUTPUT_FILE, Group, option
from eps_core.cli.info import info_command
from eps_core.cli.numbers import COUNT, SEED, TOKENS, Real
from eps_core.cli.options import (
    AUTO,
    DEMO_METHOD,
    config_of,
    flag,
    given_flags,
    kernels_option,
    method_option,
    selection_options,
    summary_options,
)
from eps_core.cli.report import report_command
from eps_core.cli.source import (
    backend_option,
    device_option,
    dtype_option,
    kv_bits_option,
    kv_dtype_option,
    model_option,
    weights_option,
)
from eps_core.cli.speculative import speculative_of, speculative_options
from eps_core.decode.prompts import PREFILL_CHUNK
from eps_core.decode.sampling import RULES as DRAW_RULES
from eps_core.decode.sampling import Sampling
from eps_core.errors import DISTRIBUTION, ConfigError, fault_line
from eps_core.io import outputs
from eps_core.load import OWN
from eps_core.metrics import steps, terminal
from eps_core.models.config import DEMO_MODEL
from eps_core.summaries.table import method_spec

if TYPE_CHECKING:
    from eps_core.evaluation.trace import Trace

DEMO_NEW_TOKENS = 16
# flags that a request calls the same
_SAME = (
    "engine", "backend", "device", "model", "dtype", "weights", "prefill_chunk", "pool_tokens", "stop", "metrics",
    "csv", "eps_audit_every", "eps_audit_factor", "eps_audit_off", "kernels", "chat", "kv_bits", "cache_dir",
    "keep_newline",
)  # fmt: skip


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=False,
    examples={
        "eps-proto run": "the demo model: dense, then EPS",
        "eps-proto run --model DIR --prompt-file long.txt --method rq --kl": "yours, and how far EPS moves it",
        "eps-proto evaluate --model DIR --longbench qasper.jsonl": "what EPS costs in quality",
    },
)
@click.version_option(package_name=DISTRIBUTION, prog_name="eps-proto")
def cli() -> None:
    """Decode from a long context while reading a fraction of its KV cache. `eps-proto run` tries it on a demo model."""


@cli.command(
    "run",
    examples={
        "eps-proto run": "the demo model on a needle prompt",
        "eps-proto run --model DIR --prompt-file long.txt --method rq --kl": "and how far EPS moves it",
        "eps-proto run --model DIR --prompt-file long.txt --method rq --eps-verify tokens": "exactly the dense text",
    },
)
@option(
    "--prompt", heading=INPUT, metavar="TEXT",
    help="Prompt text.  [default, without --model: a 4,096-token needle task]",
)  # fmt: skip
@option(
    "--prompt-file", "prompt_files", heading=INPUT, type=FILE, metavar="FILE", multiple=True,
    help="Prompt from a UTF-8 file, without one final newline; -: stdin; .jsonl: each line's \"prompt\". Several "
    "prompts are one batch.",
)  # fmt: skip
@option("--keep-newline", heading=INPUT, is_flag=True, help="Keep the final newline of a --prompt-file in the prompt.")
@option(
    "--chat", heading=INPUT, is_flag=True, help="Put the prompt into the model's chat template, as a user's message."
)
@engine_option
@backend_option
@device_option
@model_option
@dtype_option
@weights_option
@kv_dtype_option
@kv_bits_option
@option(
    "--max-new-tokens", heading=DECODING, type=TOKENS,
    help=f"Number of new tokens.  [default: 32; {DEMO_NEW_TOKENS} for the built-in prompt, whose answer is "
    "5 digits and a full stop]",
)  # fmt: skip
@option("--temperature", heading=DECODING, type=Real(), default=0.0, help="Sampling temperature; 0: greedy.")
@option("--top-p", heading=DECODING, type=Real(), default=1.0, help="Nucleus of sampling: share of the probability.")
@option("--seed", heading=DECODING, type=SEED, default=0, help="Random seed of sampling and of randomized eviction.")
@option(
    "--sample-by", heading=DECODING, type=click.Choice(DRAW_RULES), default=DRAW_RULES[0],
    help="Sampling: Gumbel noise, or cdf: inverse-CDF sampling (legacy).",
)  # fmt: skip
@option("--prefill-chunk", heading=DECODING, type=TOKENS, default=PREFILL_CHUNK, help="Tokens of a prefill chunk.")
@option(
    "--cache-dir",
    heading=DECODING,
    type=click.Path(),  # a Path would turn an empty text into the working directory
    metavar="DIR",
    help="Folder of stored prompts (K, V and summaries): a prompt that begins with one skips its prefill.",
)
@option("--pool-tokens", heading=DECODING, type=TOKENS, help="Cache size in tokens.  [default: what the run needs]")
@option("--stop/--no-stop", heading=DECODING, default=True, help="End at the model's end-of-text tokens.")
@option("--no-baseline", heading=CHECKS, is_flag=True, help="Skip the dense run.")
@option("--kl", heading=CHECKS, is_flag=True, help="Also measure KL and top-1 agreement along the dense run's tokens.")
@option(
    "--audit-every", "eps_audit_every", also=["--eps-audit-every"], heading=CHECKS, type=COUNT, default=0,
    help="Steps between dense audits: true unread mass, KL, alarms; 0: no audits.",
)  # fmt: skip
@option(
    "--audit-factor", "eps_audit_factor", also=["--eps-audit-factor"], heading=CHECKS, type=Real(1),
    default=steps.AUDIT_FACTOR,
    help="Ratio of true to estimated unread share above which an audit raises an alarm.",
)  # fmt: skip
@option(
    "--audit-off", "eps_audit_off", also=["--eps-audit-off"], heading=CHECKS, is_flag=True,
    help="Decode densely after an alarm.",
)  # fmt: skip
@option(
    "--metrics",
    heading=OUTPUT,
    type=OUTPUT_FILE,
    metavar="FILE",
    help="JSONL output file, one line a decode step or round.",
)
@option("--csv", heading=OUTPUT, type=OUTPUT_FILE, metavar="FILE", help="CSV output file with the same steps.")
@option(
    "--plot", heading=OUTPUT, type=OUTPUT_FILE, metavar="FILE",
    help="HTML output file: tokens that were read, KL along the text (implies --kl), bytes and times by layer.",
)  # fmt: skip
@kernels_option
@method_option(f"off; {DEMO_METHOD} without --model")
@selection_options
@speculative_options
@eviction_options
@summary_options
@click.pass_context
def run_command(ctx: click.Context, /, **flags: Any) -> None:
    """Decode a prompt, or a batch of them, densely, then with EPS, and compare.

    Without --model this runs the demo model on a built-in needle prompt with --method rq, and also times a layer of
    an 8B model's shape, where EPS pays more; with --model EPS is off until --method names one. --method off is the
    rollback: other --eps flags then mean nothing.

    Prints the text as it comes and a table; the last line of stdout is one JSON object. --metrics and --csv hold the
    EPS run's steps, or the dense run's where EPS is off.
    """
    outputs.check(
        {name: flags[name.strip("-")] for name in ("--metrics", "--csv", "--plot")},
        {"--prompt-file": flags["prompt_files"], "--eps-head-policy": flags["eps_head_policy"]}
        | {"--model": flags["model"] or DEMO_MODEL},
    )
    outputs.check_start("--metrics", flags["metrics"], *outputs.METRICS)
    outputs.check_start("--csv", flags["csv"], b"step,", "CSV of run")
    outputs.check_start("--plot", flags["plot"], *outputs.PAGE)
    given = given_flags(ctx, flags)
    config = config_of(flags, given, auto_min_context=True)
    keep = eviction_of(flags, given, config)
    if given & {"eps_audit_factor", "eps_audit_off"} and not flags["eps_audit_every"]:
        raise click.UsageError("--audit-factor and --audit-off need audits: add --audit-every")
    for name in ("top_p", "sample_by"):
        if name in given and not flags["temperature"]:
            raise click.UsageError(f"{flag(name)} means nothing to greedy decoding: add --temperature")
    verify = speculative_of(flags, given, config)
    if keep.enabled and flags["engine"] != OWN:
        raise click.UsageError("--kv-evict and --engine exclude each other, as its engine owns the cache: drop one")
    if flags["engine"] != OWN:
        check_engine(flags, given, config)
    # late: `eps-proto info` and --help must work where a model cannot be loaded
    from eps_core.evaluation import compare
    from eps_core.evaluation.request import RunRequest

    prompts = _prompts(flags)
    request = RunRequest(
        config=config,
        kl=flags["kl"] or (flags["plot"] is not None and not flags["no_baseline"]),
        sampling=Sampling(flags["temperature"], flags["top_p"], flags["seed"], flags["sample_by"]),
        verify=verify,
        keep=keep,
        prompts=prompts,
        max_new_tokens=flags["max_new_tokens"] or (32 if prompts else DEMO_NEW_TOKENS),
        kv_dtype=flags["kv_dtype"] or "auto",
        baseline=not flags["no_baseline"],
        method_is_default=flags["eps_method"] is None,
        auto_min_context=config.cache_config.enabled and flags["eps_min_context"] == AUTO,
        layer=_large_layer,
        **{name.removeprefix("eps_"): flags[name] for name in _SAME},
    )
    if flags["engine"] == OWN:
        path = flags["plot"]
        with nullcontext() if path is None else outputs.Output(path, "plot") as output:
            request = replace(request, plot=None if output is None else partial(_draw, output))
            result = compare.run(request, sys.stdout, ctx.obj)  # obj: the display of a caller that is no command line
    else:
        from eps_core.evaluation import engines

        result = engines.run(request, sys.stdout)
    if ctx.obj is None:
        click.echo(outputs.to_json(result))


def _draw(output: outputs.Output, trace: "Trace") -> None:
    from eps_core.report.run_page import run_page

    with output.replacing() as file:
        file.write(run_page(trace))


def _large_layer(session: Any) -> dict[str, Any] | None:
    """Return times of one layer of an 8B model's shape at 32,768 tokens, dense and sparse, on this machine."""
    from eps_core.bench.layer import Bench
    from eps_core.bench.plan import BenchRequest

    if session.kernels == "arrays":  # whose times say nothing of EPS
        return None
    request = BenchRequest(
        contexts=(32768,), fractions=(method_spec(DEMO_METHOD).budget,), dtypes=("bfloat16",), methods=(DEMO_METHOD,),
        backend=session.backend_name, device=session.device, kernels=session.kernels, seconds=1.0, warm_seconds=0.3,
    )  # fmt: skip
    try:
        with terminal.Progress("a layer of an 8B model:", "parts") as progress:
            return Bench(request, progress).headline()
    except (ConfigError, MemoryError, RuntimeError) as error:  # nothing that was asked for
        click.echo(f"no figure of an 8B model's layer ({fault_line(error)[:200]})", err=True)
        return None


def _prompts(flags: dict[str, Any]) -> tuple[str | Path, ...]:
    """The prompts, as texts or the files that hold them; none: the demo's needle document."""
    prompt: str | None = flags["prompt"]
    paths: tuple[Path, ...] = flags["prompt_files"]
    if prompt is not None and paths:
        raise click.UsageError("--prompt and --prompt-file say two things: give one of them")
    if flags["keep_newline"] and not paths:
        raise click.UsageError("--keep-newline is about the newline that ends a file: add --prompt-file, or drop it")
    if prompt is None and not paths and flags["model"] is not None:
        raise click.UsageError("--model needs a prompt: add --prompt or --prompt-file")
    return paths if prompt is None else (prompt,)


for command in (
    capture_command, replay_command, calibrate_command, evaluate_command, report_command,
    balance_command, bench_command, serve_command, info_command,
):  # fmt: skip
    cli.add_command(command)


def _fail(message: str) -> NoReturn:
    try:
        click.echo("error: " + " ".join(message.split()), err=True)
    except OSError:  # nobody reads it; what is stuck goes nowhere, or Python's own flush would end with status 120
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    sys.exit(2)


def _open_streams() -> None:
    """Standard streams that were closed before we came lead nowhere: else the next file that is opened gets their
    number, and what is printed goes into it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the run


def _flush() -> None:
    """Flush stdout; raise OSError where it cannot be written: what is stuck then goes nowhere, so that Python's own
    flush at exit has nothing to complain of."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _command_line() -> Any:
    return cli.main(prog_name="eps-proto", standalone_mode=False)


def main(run: Callable[[], Any] = _command_line) -> None:
    """Entry point: every mistake of the user's is one line on stderr and exit code 2."""
    _open_streams()
    try:
        try:
            code = run()
        finally:
            _flush()
    except (BrokenPipeError, SystemExit):  # whoever read us has gone (click turns that into an exit): nobody to tell
        sys.exit(2)
    except click.UsageError as error:
        _fail(f"{error.format_message()} ({error.ctx.command_path if error.ctx else 'eps-proto'} --help)")
    except click.ClickException as error:
        _fail(error.format_message())
    except ConfigError as error:
        _fail(str(error))
    except OSError as error:
        nameless = f"standard output cannot be written ({error.strerror}): send it elsewhere"
        _fail(str(error) if error.filename else nameless)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise  # a fault of ours
        _fail(f"{fault_line(error)[:300]}: shorten the context, give fewer prompts, or free memory")
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
