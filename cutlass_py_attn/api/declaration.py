"""Declaration: a function as its callers see it, with every option as a keyword, apart from the function that runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def implemented_by(function: Callable[..., R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates the declaration of a public function; the name then stands for `function`, which computes the result.

    The declaration has every option as a keyword-only parameter with its default. Editors read it from the source, and
    help() and inspect.signature find it through `function`. Its body never runs.

    `function` takes `**options`, the options that a call gives. A cached call is keyed by these few alone, and an
    option that does not exist is refused together with everything else that is wrong with the call.
    """

    def declare(declaration: Callable[P, R]) -> Callable[P, R]:
        return cast("Callable[P, R]", functools.update_wrapper(cast("Any", function), declaration))

    return declare
