"""Group: the list of commands. Expected errors end a command with one message, without a traceback."""

from __future__ import annotations

import signal
from typing import Any

import click

from cutlass_py_attn import __version__
from cutlass_py_attn.cli.bench import bench
from cutlass_py_attn.cli.build import build
from cutlass_py_attn.cli.cache import cache
from cutlass_py_attn.cli.doctor import doctor
from cutlass_py_attn.cli.export import export
from cutlass_py_attn.cli.inspect import inspect
from cutlass_py_attn.cli.list_kernels import list_kernels
from cutlass_py_attn.cli.run import run
from cutlass_py_attn.errors import AttentionError


class _Group(click.Group):
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


for command in (run, doctor, list_kernels, build, export, inspect, bench, cache):
    group.add_command(command)
