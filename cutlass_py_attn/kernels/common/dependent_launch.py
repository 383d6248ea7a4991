"""Programmatic dependent launch: a kernel starts while the kernel before it still runs, and waits for that one's end.

A kernel may say that the next one may start as soon as all its own blocks run; else the next one starts when they exit.
Blocks of the next kernel get what those of this one leave free. They prepare what does not depend on the kernel before
and wait; the wait ends when every write of that kernel is visible. Without the launch attribute neither has an effect.
"""

import cutlass.cute as cute

from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.entry_points import entries, is_dependent_launch


def start_next(build: Build, role: str) -> None:
    """Lets the entry behind `role` start, if it waits for this one itself. All threads call this."""
    following = dict(zip(entries(build), [*entries(build)][1:], strict=False)).get(role)
    if following is not None and is_dependent_launch(build, following):
        cute.arch.griddepcontrol_launch_dependents()


def wait_for_previous(build: Build, role: str) -> None:
    """Waits for the end of the entry ahead of `role`, before an access to what it touches.

    At least one warp of every block calls this, so that the kernel never ends before the entry ahead.
    """
    if is_dependent_launch(build, role):
        cute.arch.griddepcontrol_wait()
