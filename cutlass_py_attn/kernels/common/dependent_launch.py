"""Programmatic dependent launch: a kernel starts while the kernel before it still runs, and waits for that one's end.

The kernel before says that the next one may start. It does so first of all, because blocks of the next one get only
what the blocks of this one leave free, and these are then all running. The next kernel prepares what does not depend on
global memory and waits; its wait ends when every write of the kernel before is visible. Without the launch attribute
neither has an effect.
"""

import cutlass.cute as cute

from cutlass_py_attn.plan.build import Build
from cutlass_py_attn.plan.entry_points import entries, is_dependent_launch


def start_next(build: Build, role: str) -> None:
    """Lets the entry behind `role` start, if it waits for this one itself. All threads call this."""
    following = dict(zip(entries(build), [*entries(build)][1:], strict=False)).get(role)
    if following is not None and is_dependent_launch(build, following):
        cute.arch.griddepcontrol_launch_dependents()


def wait_for_previous(build: Build, role: str) -> None:
    """Waits for the end of the entry ahead of `role`, before any access to global memory. All threads call this."""
    if is_dependent_launch(build, role):
        cute.arch.griddepcontrol_wait()
