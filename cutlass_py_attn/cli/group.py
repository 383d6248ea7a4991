"""Group: the list of commands. An error of this package ends a command with its message, without a traceback."""

from __future__ import annotations

from typing import Any

import click

from cutlass_py_attn import __version__
from cutlass_py_attn.cli.bench import bench
from cutlass_py_attn.cli.build import build
from cutlass_py_attn.cli.doctor import doctor
from cutlass_py_attn.cli.export import export
from cutlass_py_attn.cli.inspect import inspect
from cutlass_py_attn.cli.run import run
from cutlass_py_attn.errors import AttentionError


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AttentionError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="cutlass-py-attn")
def group() -> None:
    """Fused attention as bare GPU kernels: plan, compile, inspect, run and measure them."""


for command in (run, doctor, build, export, inspect, bench):
    group.add_command(command)
