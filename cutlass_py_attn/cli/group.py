"""Group: the list of commands, each imported when it runs. Expected errors end one with a message, not a traceback."""

from __future__ import annotations

import importlib
import signal
from typing import Any, Final

import click

from cutlass_py_attn import __version__
from cutlass_py_attn.errors import AttentionError
from cutlass_py_attn.suggestions import did_you_mean

# By name: the module and the function of a command, and the summary that --help prints without importing them.
COMMANDS: Final = {
    "bench": ("bench.bench", "Measure forward and backward by CUDA graph replays: TFLOP/s."),
    "build": ("build.build", "Compile kernels into a folder, from which machines without the compiler launch them."),
    "cache": ("cache.cache", "Show or clear the disk cache of compiled kernels."),
    "doctor": ("doctor.doctor", "Show what is installed and which GPU there is, with the remedy for what is missing."),
    "export": ("export.export", "Write a bundle: cubins, PTX, manifest.json and C code that launches the kernels."),
    "inspect": ("inspect.inspect", "Show the compiled code and the resources of a kernel; no GPU is needed."),
    "list": ("list_kernels.list_kernels", "List kernels by their symbols, with the problems that they serve."),
    "run": ("run.run", "Compile the kernels, show their resources, run them, check them and time them."),
}


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name][0].partition(".")
        command: click.Command = getattr(importlib.import_module(f"cutlass_py_attn.cli.{module}"), function)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise click.UsageError(f"{error.message} {did_you_mean(args[0], COMMANDS)}".rstrip(), ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AttentionError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:
            raise  # the reader of the output has ended: click exits in silence
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            raise click.ClickException(f"{place}{error.strerror or error}") from error
        except KeyboardInterrupt as error:
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(128 + signal.SIGINT) from error  # as shells report a program that Ctrl-C ended


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="cutlass-py-attn")
def group() -> None:
    """Fused attention as bare GPU kernels: plan, compile, inspect, run and measure them."""
