"""Exceptions. Each message states what was given, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class AttentionError(Exception):
    """Base class of the errors that this package raises."""


class NotSupported(AttentionError, ValueError):
    """A problem or an argument is not supported. reasons: every reason, not only the first."""

    def __init__(self, reasons: str | Iterable[str]) -> None:
        self.reasons: tuple[str, ...] = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        super().__init__("\n".join(self.reasons))


class DoesNotFit(AttentionError, ValueError):
    """A plan needs more registers, shared memory or threads than its architecture has. objections: every excess."""

    def __init__(self, objections: str | Iterable[str]) -> None:
        self.objections: tuple[str, ...] = (objections,) if isinstance(objections, str) else tuple(objections)
        super().__init__("\n".join(self.objections))


class CompileError(AttentionError, RuntimeError):
    """The compiler failed, or its output breaks the plan: spills, a stack frame, wrong parameters."""


class BreaksPlan(CompileError):
    """The compiler's output breaks the plan, and would again: the error may be cached."""


class DriverError(AttentionError, RuntimeError):
    """A driver call failed. The message has NVIDIA's text, the call and its arguments.

    code: the CUresult as int; None if it is unknown.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        self.code = code
        super().__init__(message)


class NoDevice(AttentionError, RuntimeError):
    """This machine has no usable driver or GPU."""


class Stale(AttentionError, RuntimeError):
    """An artifact or a bundle does not belong to the plan, architecture or source that uses it."""
