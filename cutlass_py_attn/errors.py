"""Errors: what went wrong, what was given, what is allowed, what to do."""

from __future__ import annotations

from collections.abc import Iterable


class AttentionError(Exception):
    """Base of every error this package raises on purpose."""


class NotSupported(AttentionError, ValueError):
    """The problem or an argument is refused; `reasons` holds every objection, not only the first."""

    def __init__(self, reasons: str | Iterable[str]) -> None:
        self.reasons: tuple[str, ...] = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        super().__init__("\n".join(self.reasons))


class DoesNotFit(AttentionError, ValueError):
    """A plan needs more registers, shared memory or threads than its architecture has."""

    def __init__(self, objections: str | Iterable[str]) -> None:
        self.objections: tuple[str, ...] = (objections,) if isinstance(objections, str) else tuple(objections)
        super().__init__("\n".join(self.objections))


class CompileError(AttentionError, RuntimeError):
    """The compiler failed, or what it made breaks the plan's budget (spills, stack, wrong parameters)."""


class BreaksPlan(CompileError):
    """What the compiler makes of a build breaks its budget, whenever it is asked."""


class DriverError(AttentionError, RuntimeError):
    """A driver call failed: NVIDIA's sentence, the call and our arguments. `code` is the CUresult as int."""

    def __init__(self, message: str, code: int | None = None) -> None:
        self.code = code
        super().__init__(message)


class NoDevice(AttentionError, RuntimeError):
    """There is no usable driver or GPU on this machine."""


class Stale(AttentionError, RuntimeError):
    """An artifact or a bundle does not belong to the plan, architecture or source it is used with."""
