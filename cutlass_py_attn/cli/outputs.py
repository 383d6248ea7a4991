"""Outputs: counts in words, and options for files and folders to write, checked before a command computes anything."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from cutlass_py_attn.plan import performance
from cutlass_py_attn.plan.plan import Plan

PROBE_BYTES = 4096  # enough for a full disk to refuse


class OutputFolder(click.Path):
    """A folder to write to; it and the folders above it are created when something is written."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Returns the path; fails if no file can be written there."""
        path: Any = super().convert(value, param, ctx)
        return _checked(self, path, _probe_folder, param, ctx)


class OutputFile(click.Path):
    """A file to write; the folders above it are created when it is written."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Returns the path; fails if the file cannot be written."""
        path: Any = super().convert(value, param, ctx)
        return _checked(self, path, _probe_file, param, ctx)


def counted(count: int, noun: str, plural: str = "") -> str:
    """Returns a count with its noun: `1 kernel`, `2 kernels`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def show_slow_roads(plans: Iterable[Plan]) -> None:
    """Prints what would make plans of named problems much faster; nothing for most."""
    for line in dict.fromkeys(filter(None, map(performance.advice, plans))):
        click.echo(line)


def write_text(path: Path, text: str) -> None:
    """Writes a file of an OutputFile option."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager that ends the command with one sentence if `path`, or a file below it, cannot be written."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(
            f"{error.filename or path}: cannot be written ({_reason(error)}); free space, or name another place"
        ) from error


def _checked(
    kind: click.Path,
    path: Path,
    probe: Callable[[Path], None],
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> Path:
    try:
        probe(path)
    except OSError as error:
        kind.fail(f"{path}: cannot be written ({_reason(error)}); name another place", param, ctx)
    return path


def _probe_folder(path: Path) -> None:
    """Raises OSError if no file can be written in the folder. Leaves nothing behind."""
    created = []
    try:
        for folder in reversed((path, *path.parents)):
            if not folder.is_dir():
                folder.mkdir()
                created.append(folder)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(PROBE_BYTES))
    finally:
        for folder in reversed(created):
            folder.rmdir()


def _probe_file(path: Path) -> None:
    """Raises OSError if the file cannot be written. Leaves it as it is."""
    if path.exists():
        path.open("ab").close()
    else:
        _probe_folder(path.parent)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
