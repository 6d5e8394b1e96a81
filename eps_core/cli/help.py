"""How `--help` reads: examples first, then the flags under headings. Old names of flags are taken and not shown."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

# in the order in which they are printed
INPUT, MODEL, DECODING = "Input", "Model and device", "Decoding"
METHOD, SELECTION, CHECKS = "Summaries", "Selection", "Baseline and audits"
VERIFY, KEEP = "Self-speculative decoding", "KV cache eviction"
MEASURING, OUTPUT, OTHER = "Measuring", "Output", "Other"
HEADINGS = (INPUT, MODEL, DECODING, METHOD, SELECTION, VERIFY, KEEP, CHECKS, MEASURING, OUTPUT, OTHER)

FILE = click.Path(path_type=Path)
# click's own check would ask that it can be read, which another user's pipe behind /dev/stdout cannot
OUTPUT_FILE = click.Path(path_type=Path, readable=False)


class Flag(click.Option):
    """A flag under a heading; `also`: names that it is taken by, too, and that nothing shows."""

    def __init__(
        self, decls: Sequence[str] | None = None, *, heading: str = OTHER, also: Sequence[str] = (), **settings: Any
    ) -> None:
        super().__init__(decls, **settings)
        self.heading, self.also = heading, tuple(also)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts
        self.opts = [*shown, *self.also]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


class _Help:
    """The part that commands and their group share."""

    def __init__(self, *args: Any, examples: Mapping[str, str] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.examples = examples or {}  # command line -> what it is for

    def format_help(self: Any, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.examples), default=0)
        lines = [f"{line:{width}}  # {meaning}\n" for line, meaning in self.examples.items()]
        formatter.write("".join([*lines, "\n"]))
        super().format_help(ctx, formatter)  # type: ignore[misc]

    def format_options(self: Any, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)
        for heading in HEADINGS:
            here = [param for param in self.get_params(ctx) if getattr(param, "heading", OTHER) == heading]
            records = [record for param in here if (record := param.get_help_record(ctx)) is not None]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class Command(_Help, click.Command):
    """A command with examples."""


class Group(_Help, click.Group):
    """A group with examples, of commands with examples."""

    command_class = Command


option = partial(click.option, cls=Flag, show_default=True)
command: Callable[..., Any] = partial(click.command, cls=Command)


def options(*several: Callable) -> Callable:
    """Several flags as one decorator, in their order."""

    def decorate(function: Callable) -> Callable:
        for one in reversed(several):
            function = one(function)
        return function

    return decorate
