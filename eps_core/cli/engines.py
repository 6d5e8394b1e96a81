"""EPS in the engines that people run: `run --engine` compares in one, `serve` starts its server."""

import socket
from typing import Any

import click

from eps_core.cli.help import CHECKS, MODEL, OUTPUT, OUTPUT_FILE, command, option
from eps_core.cli.numbers import COUNT, Whole
from eps_core.cli.options import (
    AUTO,
    config_of,
    flag,
    given_flags,
    kernels_option,
    method_option,
    selection_options,
    summary_options,
)
from eps_core.cli.source import model_option
from eps_core.config.eps import EpsConfig
from eps_core.errors import ConfigError
from eps_core.integrations.settings import Settings, has_flag
from eps_core.io import outputs
from eps_core.load import ENGINES, OWN, SERVED
from eps_core.models.config import DEMO_MODEL

# what our own decoders do and engines do not, or do their own way
_OWN_ONLY = (
    "backend", "weights", "kv_dtype", "kv_bits", "prefill_chunk", "cache_dir", "pool_tokens", "kl", "sample_by",
    "eps_audit_factor", "eps_audit_off", "plot",
)  # fmt: skip

engine_option = option(
    "--engine", heading=MODEL, type=click.Choice((OWN, *ENGINES)), default=OWN,
    help="Engine that runs the model: EPS's own decoder, or another engine with EPS in it.",
)  # fmt: skip


def check_engine(flags: dict[str, Any], given: set[str], config: EpsConfig) -> None:
    """Raise UsageError for flags that another engine than our own does not have."""
    for name in _OWN_ONLY:
        if name in given:
            raise click.UsageError(f"{flag(name)} belongs to our own decoders: drop it or --engine {flags['engine']}")
    if flags["eps_min_context"] == AUTO:
        raise click.UsageError("--eps-min-context auto times our own decoders: give a number of tokens")
    if not config.cache_config.enabled:
        raise click.UsageError(f"--engine {flags['engine']} with EPS off has nothing to compare: choose a --method")


def _check_address(host: str, port: int) -> None:
    """Raises ConfigError where nobody can listen: engines find out when their model is loaded, or their threads run."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"nobody can listen at {host} port {port} ({error.strerror}): choose another --port, or --host"
        ) from error


@command(
    "serve",
    examples={
        "eps-proto serve --engine mlx-lm --model DIR --method rq": "an OpenAI endpoint on this machine",
        "eps-proto serve --engine vllm --model DIR --method rq -- --max-model-len 65536": "with vLLM's own flags",
        "eps-proto serve --engine vllm --model DIR --method off": "the same server without EPS",
    },
)
@option("--engine", heading=MODEL, type=click.Choice(SERVED), required=True, help="Engine to serve with.")
@model_option
@option("--host", heading=MODEL, default="127.0.0.1", help="Address to listen at.")
@option("--port", heading=MODEL, type=Whole(most=65535), default=8000)
@kernels_option
@option(
    "--audit-every", "eps_audit_every", also=["--eps-audit-every"], heading=CHECKS, type=COUNT, default=0,
    help="Steps between dense audits, which measure the true unread mass; 0: no audits.",
)  # fmt: skip
@option(
    "--metrics", heading=OUTPUT, type=OUTPUT_FILE, metavar="FILE", help="JSONL output file, one line a decode step."
)
@method_option("off; rq without --model")
@selection_options
@summary_options
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def serve_command(ctx: click.Context, /, **flags: Any) -> None:
    """Start an engine's own OpenAI-compatible server with EPS in it. What stands after -- goes to that server as it is;
    --host and --port go before it.

    The endpoint, its batching and its flags are the engine's; EPS makes the decode steps of the layers that it
    names at the start sparse. --method off starts the same server without EPS.
    """
    for name in ("--host", "--port"):
        if has_flag(flags["more"], name):
            raise click.UsageError(f"{name} stands after --, where the address is not checked: give it before --")
    outputs.check({"--metrics": flags["metrics"]}, {"--model": flags["model"] or DEMO_MODEL})
    outputs.check_start("--metrics", flags["metrics"], *outputs.METRICS)
    given = given_flags(ctx, flags)
    config = config_of(flags, given)
    from eps_core.models.hub import resolve_for_engine  # late: --help must work where a model cannot be loaded

    path, module = resolve_for_engine(flags["model"], flags["engine"])
    settings = Settings(config, flags["metrics"], flags["eps_audit_every"], flags["kernels"])
    _check_address(flags["host"], flags["port"])
    click.echo(f"starting {flags['engine']} at http://{flags['host']}:{flags['port']}/v1, model name {path}", err=True)
    code = module.serve(path, settings, flags["host"], flags["port"], flags["more"])
    ctx.exit(code)
