"""Result type of the backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients by the name of their operand, in the caller's library; None for one that was not requested.

    A gradient has the shape and dtype of its operand; that of sinks is float32.
    """

    query: Any = None
    key: Any = None
    value: Any = None
    bias: Any = None
    sinks: Any = None
