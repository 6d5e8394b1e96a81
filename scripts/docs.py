"""Write the generated parts of docs/: between `<!-- begin NAME -->` and `<!-- end NAME -->`, from the code itself.

python scripts/docs.py            # writes what is out of date
python scripts/docs.py --check    # exit status 1 where something is
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
from shared import markdown_table
from tables import update

from eps_core.cli.help import HEADINGS, OTHER
from eps_core.cli.main import cli
from eps_core.config import bytes as sizes
from eps_core.config.cache import METHODS, CacheConfig
from eps_core.config.eps import EpsConfig
from eps_core.config.formats import AS_THEY_ARE, FORMATS
from eps_core.eviction.table import POLICIES
from eps_core.integrations.versions import TESTED, tested
from eps_core.models.registry import FAMILIES
from eps_core.summaries import norm, table
from eps_core.summaries.base import Field

DOCS = Path(__file__).resolve().parent.parent / "docs"
PART = re.compile(r"(<!-- begin (.*?) -->\n)(.*?)(<!-- end \2 -->)", re.S)
HEAD_DIM, KV_TOKEN_BYTES = 128, 512  # of the examples: bfloat16 K and V of one token and KV head


def number(value: float) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".")


# ------------------------------------------------------------------------------------------------------------- commands


def commands() -> str:
    """Return help, examples and flags of every command; of flags that an earlier command has, the names alone."""
    seen: set[tuple[str, str]] = set()
    return "\n\n".join(_command(name, one, seen) for name, one in cli.commands.items())


def _command(name: str, command: click.Command, seen: set[tuple[str, str]]) -> str:
    """`seen`: (flag, meaning) of the commands before; those of this one are added."""
    examples: Mapping[str, str] = getattr(command, "examples", {})
    width = max(map(len, examples), default=0)
    lines = "".join(f"{line:{width}}  # {what}\n" for line, what in examples.items())
    parts = [f"## {name}\n\n{_help(command)}", f"```text\n{lines}```"]
    rows: dict[str, list[tuple[str, str]]] = {}
    known: list[tuple[str, str]] = []
    for param in command.params:
        record = param.get_help_record(click.Context(command))
        if record is None or (not record[1] and not isinstance(param, click.Option)):
            continue
        row = _row(param, *record)
        if row in seen:
            known.append(row)
        else:
            rows.setdefault(getattr(param, "heading", OTHER), []).append(row)
    parts += [markdown_table((heading, "meaning"), rows[heading]) for heading in HEADINGS if heading in rows]
    if known:
        parts.append(_as_above(known, command))
    seen |= {row for new in rows.values() for row in new}
    return "\n\n".join(parts)


def _as_above(known: Sequence[tuple[str, str]], command: click.Command) -> str:
    """Return the line on flags that an earlier command has: a heading of `run` where all flags of it are there."""
    flags = _headings(command)
    whole = {heading for heading, names in _headings(cli.commands["run"]).items() if names <= flags.get(heading, set())}
    whole = {heading for heading in whole if len(flags[heading]) > 3}
    inside = set().union(*(flags[heading] for heading in whole))
    named = [name for name in (_first(flag) for flag, _ in known) if name not in inside]
    more = [f"all of {heading}" for heading in HEADINGS if heading in whole]
    return f"As above: {', '.join([*(f'`{name}`' for name in named), *more])}."


def _headings(command: click.Command) -> dict[str, set[str]]:
    """Return the flags of a command under each heading."""
    found: dict[str, set[str]] = {}
    for param in command.params:
        found.setdefault(getattr(param, "heading", OTHER), set()).add(param.opts[0])
    return found


def _first(flag: str) -> str:
    """Return the first name of a flag as a table shows it."""
    return flag.strip("`").split()[0].rstrip(",")


def _help(command: click.Command) -> str:
    """Return the help with lines joined; what click prints as it stands, after a \\b, is a block of text."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return "\n\n".join(
        f"```text\n{text.lstrip()[2:]}\n```" if text.lstrip().startswith("\b") else text for text in paragraphs
    )


def _row(param: click.Parameter, flag: str, meaning: str) -> tuple[str, str]:
    meaning = re.sub(r"\s+", " ", meaning)
    meaning = re.sub(r"\.?\s*\[default(, .*?)?: (.*?)\]", r". Default\1: \2.", meaning).removeprefix(". ")
    meaning = meaning.replace("[required]", "Required.").strip()
    if isinstance(param.type, click.Choice):
        flag = re.sub(r" \[.*\]$", "", flag)
        meaning += " One of " + ", ".join(f"`{one}`" for one in param.type.choices) + "."
    also = ", ".join(f"`{one}`" for one in getattr(param, "also", ()))
    return f"`{flag}`", meaning + (f" Also taken as {also}." if also else "")


# -------------------------------------------------------------------------------------------------------------- methods


def methods() -> str:
    """Return a row of each public method: group size, bytes, estimate and bounds."""
    rows = []
    for name in METHODS[1:]:
        config = EpsConfig.of(method=name).cache_config
        spec, stored = config.method_spec, sizes.summary_group_bytes(config, HEAD_DIM)
        bounds = f"with `--eps-{spec.bounds_setting.replace('_', '-')}`" if spec.bounds_setting else "none"
        rows.append((
            f"[`{name}`](#{name})", config.S, number(stored), f"{stored / config.S / KV_TOKEN_BYTES:.2%}",
            "norm" if spec.norm_estimate else "log mass", "own" if config.own_bounds else bounds,
            "-" if spec.dim is None else f"{spec.dim_means} = {spec.dim}",
        ))  # fmt: skip
    return markdown_table(
        ("method", "tokens a group", "bytes a group", "of K and V", "estimate", "bounds", "`--eps-dim`"), rows
    )


def stored_fields() -> str:
    """Return a row of each array that the default method stores of the tokens of one mean."""
    config: CacheConfig = EpsConfig.of(method="rq").cache_config
    rows = [
        (f"`{name}`", f"{field.dtype} {[*field.shape] if field.shape else ''}", str(field.num_bytes), _read_of(field))
        for name, field in table.fields(config, HEAD_DIM).items()
    ]
    total = sizes.span_bytes(config, HEAD_DIM)
    rows.append(("all", "", f"{total:,}", f"{number(total / config.span_tokens)} bytes a token"))
    return markdown_table(("field", "array", "bytes", "read of"), rows)


def _read_of(field: Field) -> str:
    if field.best_only:
        return "the best by the codes (`--eps-rescore`)"
    return "the best by the first half (`--eps-cascade`)" if field.part else "all"


def shortest_method() -> str:
    return f"```python\n{inspect.getsource(norm)}```"


# --------------------------------------------------------------------------------------------------------------- memory


def policies() -> str:
    rows = []
    for name, module in POLICIES.items():
        spec = module.SPEC
        recent = f"{spec.num_recent_tokens:g}" + (" of the budget" if spec.num_recent_tokens < 1 else "")
        rows.append((f"`{name}`", spec.source, str(spec.window or "-"), recent, spec.deviations))
    return markdown_table(("policy", "source", "window", "recent", "deviations"), rows)


def formats() -> str:
    rows: list[tuple] = [(f"`{AS_THEY_ARE}`", "as `--kv-dtype`", "2", number(KV_TOKEN_BYTES // 2), "any")]
    for name, form in FORMATS.items():
        scales = "a float16 a row" + (f", an E4M3 a block of {form.block}" if form.block else "")
        multiple = "any" if form.multiple == 1 else f"multiples of {form.multiple}"
        bytes_of = number(form.code_bits / 8), form.row_bytes(HEAD_DIM)
        rows.append((f"`{name}`", f"{form.words}: {scales}", *bytes_of, multiple))
    return markdown_table(
        ("`--kv-bits`", "codes and scales", "bytes an element", "bytes a row of 128", "head dims"), rows
    )


# --------------------------------------------------------------------------------------------------------------- models


def families() -> str:
    rows = [
        (f"`{name}`", f"`{one.architecture}`", f"[{file}](../eps_core/models/{file})")
        for name, one in FAMILIES.items()
        for file in [f"{one.read.__module__.rpartition('.')[2]}.py"]
    ]
    return markdown_table(("`model_type`", "`architectures`", "file"), rows)


# -------------------------------------------------------------------------------------------------------------- engines


def engine_versions() -> str:
    """Return a row of each engine's package: the releases that tests ran with, and the version that they install."""
    tests = DOCS.parent / "tests"
    pins = [*sorted(tests.glob("*/requirements.txt")), DOCS.parent / "constraints.txt"]  # the last wins
    installed = dict(line.split("==") for pin in pins for line in pin.read_text().splitlines() if "==" in line)
    rows = [(f"`{package}`", tested(package), installed.get(package, "-")) for package in TESTED]
    return markdown_table(("package", "tested releases", "version of the test suite"), rows)


# -------------------------------------------------------------------------------------------------------------- scripts


def scripts() -> str:
    """Return the comment at the head of every script that writes a folder of results."""
    parts = []
    for script in sorted((DOCS.parent / "scripts").glob("*.sh")):
        head = re.match(r"#!.*\n((?:#.*\n)*)", script.read_text())
        text = re.sub(r"^# ?", "", head[1], flags=re.M) if head else ""
        if "results" in text and "Usage" in text:
            parts.append(f"## [{script.name}](../scripts/{script.name})\n\n```text\n{text}```")
    return "\n\n".join(parts)


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "methods": methods,
    "rq fields": stored_fields,
    "a method": shortest_method,
    "policies": policies,
    "formats": formats,
    "families": families,
    "engine versions": engine_versions,
    "scripts": scripts,
}


def generated(text: str) -> str:
    """Return a page with its generated parts made again."""
    return PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[4]}", text)


def main() -> int:
    return update(__doc__, DOCS, generated)


if __name__ == "__main__":
    sys.exit(main())
