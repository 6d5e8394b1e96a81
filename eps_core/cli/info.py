"""`eps-proto info`: what is usable here, and the memory that summaries, kept tokens and their bits take."""

import platform
from typing import Any

import click

from eps_core.cli.help import FILE, MODEL, command, option
from eps_core.cli.numbers import TOKENS
from eps_core.cli.options import given_flags, summary_options, summary_settings
from eps_core.cli.source import kv_bits_option
from eps_core.config.bytes import kv_bytes, open_group_bytes
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import described
from eps_core.errors import ConfigError
from eps_core.io import outputs
from eps_core.load import BACKENDS, load_backend
from eps_core.metrics import memory, provenance, terminal


@command(
    "info",
    examples={
        "eps-proto info": "what is usable here, what summaries take",
        "eps-proto info --model DIR --context 32768": "for your model's shape",
        "eps-proto info --layers 32 --kv-heads 8 --head-dim 128 --eps-rescore 0": "rq without its rescoring bit",
    },
)
@option("--model", heading=MODEL, type=FILE, metavar="MODEL", help="Model whose config.json gives the shape.")
@option("--layers", heading=MODEL, type=TOKENS, default=32)
@option("--kv-heads", heading=MODEL, type=TOKENS, default=32)
@option("--head-dim", heading=MODEL, type=TOKENS, default=128)
@option(
    "--context", heading=MODEL, type=TOKENS, help="Context length in tokens.  [default: 65536, or the model's context]"
)
@kv_bits_option
@summary_options
@click.pass_context
def info_command(ctx: click.Context, /, **flags: Any) -> None:
    """Print devices, versions, usable backends, and the memory that summaries take for a model shape.

    The last line of stdout is one JSON object with the same numbers.
    """
    given = given_flags(ctx, flags)
    layers, kv_heads, head_dim = flags["layers"], flags["kv_heads"], flags["head_dim"]
    context = flags["context"] or 65536
    if flags["model"] is not None:
        if given & {"layers", "kv_heads", "head_dim"}:
            raise click.UsageError("--model already says the shape: drop --layers, --kv-heads and --head-dim")
        from eps_core.models.config import read_spec
        from eps_core.models.hub import resolve_model

        spec = read_spec(resolve_model(flags["model"], weights=False))
        layers, kv_heads, head_dim = spec.num_layers, spec.num_kv_heads, spec.head_dim
        context = flags["context"] or spec.max_context
    if flags["eps_group_size"] is not None and flags["eps_group_blocks"] is not None:
        raise click.UsageError("--eps-group-size and --eps-group-blocks say the same thing twice: give one of them")
    settings, sizes = summary_settings(flags), (layers, kv_heads, head_dim, context)
    rows = memory.memory_rows(sizes, flags["kv_bits"], settings)
    backends = {name: _backend_status(name) for name in BACKENDS}
    click.echo(f"eps {provenance.package_version() or '(not installed)'}, Python {platform.python_version()}")
    for name, status in backends.items():
        if status["usable"]:
            versions = ", ".join(f"{package} {version}" for package, version in status["versions"].items())
            click.echo(f"backend {name:5} usable on {', '.join(status['devices'])} ({versions})")
        else:
            click.echo(f"backend {name:5} not usable: {status['why_not']}")
    dense = kv_bytes(*sizes, "bfloat16", flags["kv_bits"])
    held = described("bfloat16", flags["kv_bits"])
    click.echo(
        f"\n{layers} layers x {kv_heads} kv heads of {head_dim} x {context:,} tokens: "
        f"{held} KV cache {dense / terminal.MIB:,.0f} MiB; summaries of one sequence:\n"
    )
    click.echo(memory.memory_table(rows))
    statistics, following = open_group_bytes(layers, kv_heads, head_dim)
    click.echo(
        f"\n{' and '.join(following)} also keep {statistics / 1024:,.0f} KiB of running statistics for each "
        "sequence in mid-group, so that a growing group is never read back."
    )
    of_rq = {name: value for name, value in settings.items() if name not in ("dim", "group_blocks")}
    kept = memory.kept_rows(sizes, flags["kv_bits"], EpsConfig.of("rq", **of_rq).cache_config)
    click.echo("\nMiB of K and V, and of rq's summaries, by --kv-bits and --kv-keep:\n\n" + memory.kept_table(kept))
    shape = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "context": context, "kv_bytes": dense}
    shape["kv_bits"] = flags["kv_bits"]
    click.echo(outputs.to_json({"backends": backends, "shape": shape, "summaries": rows, "kept": kept}))


def _backend_status(name: str) -> dict[str, Any]:
    try:
        backend = load_backend(name)
        return {"usable": True, "devices": backend.devices(), "versions": backend.versions(), "why_not": None}
    except ConfigError as error:
        return {"usable": False, "devices": [], "versions": {}, "why_not": str(error)}
