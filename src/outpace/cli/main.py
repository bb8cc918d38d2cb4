"""`outpace`: the commands, and errors as one line with exit code 2."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer

from ..errors import OutpaceError
from . import audit, bench, demo, drafters, generate, layers, plan, train, tree

app = typer.Typer(
    name="outpace",
    help="Lossless speculative decoding: the target model's own output, faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("bench")(bench.bench)
app.command("audit")(audit.audit)
app.command("drafters")(drafters.drafters)
app.command("plan")(plan.plan)
app.command("tree")(tree.tree)
app.command("layers")(layers.layers)
app.command("demo")(demo.demo)
app.add_typer(train.app, name="train")

# The root of what a wrong command line raises, whichever click typer is built on.
_UsageError: Any = typer.BadParameter.__mro__[1]


def _version(value: bool) -> None:
    if value:
        from .. import __version__

        typer.echo(f"outpace {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(
            args=None if arguments is None else list(arguments),
            prog_name="outpace",
            standalone_mode=False,
        )
        return code if isinstance(code, int) else 0
    except OutpaceError as error:
        return _fail(str(error))
    except _UsageError as error:
        if not error.format_message():  # the help was printed instead
            return 2
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "outpace"
        return _fail(f"{error.format_message().rstrip('.')}: see {where} --help")
    except (KeyboardInterrupt, typer.Abort):
        print(file=sys.stderr)
        return 130


def _fail(message: str) -> int:
    print("outpace: " + " ".join(message.split()), file=sys.stderr)
    return 2


def main() -> None:
    """Entry point of the `outpace` command."""
    if sys.stdout is None:  # closed by the shell
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode is no error
    try:
        code = run()
    except Exception:  # a fault of ours; 1 would be an audit's verdict
        traceback.print_exc()
        code = 70
    sys.exit(code)
