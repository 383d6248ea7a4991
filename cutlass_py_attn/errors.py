"""Exceptions. Each message states what was given, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Self

from cutlass_py_attn.refusals import Refusal, sentence


class AttentionError(Exception):
    """Base class of the errors that this package raises."""


class Refused(AttentionError, ValueError):
    """What was asked for is refused.

    refusals: every reason, not only the first: what was given, what is allowed and what to do
    reasons: the same as sentences
    """

    def __init__(self, reasons: str | Refusal | Iterable[str | Refusal]) -> None:
        several = (reasons,) if isinstance(reasons, (str, Refusal)) else reasons
        self.refusals: tuple[Refusal, ...] = tuple(
            sentence(reason) if isinstance(reason, str) else reason for reason in several
        )
        super().__init__("\n".join(self.reasons))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason as a sentence."""
        return tuple(map(str, self.refusals))

    def renamed(self, change: Callable[[str], str]) -> Self:
        """Returns the error with other names in the texts of its refusals."""
        return type(self)(refusal.renamed(change) for refusal in self.refusals)


class NotSupported(Refused):
    """A problem or an argument is not supported."""


class DoesNotFit(Refused):
    """A plan needs more registers, shared memory or threads than its architecture has."""


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
