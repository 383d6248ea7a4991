"""One code block of the documentation; needs the standard library alone, so that a GPU machine can read it."""

from __future__ import annotations

import doctest
import hashlib
from dataclasses import dataclass

OUTPUT_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced code block.

    page: file name of the page.
    line: number of the block's first line of code on the page, from 1.
    info: info string of the fence, such as "python gpu".
    code: source text without the last newline.
    expected: what the block must print; None for anything.
    """

    page: str
    line: int
    info: str
    code: str
    expected: str | None = None

    @property
    def name(self) -> str:
        """Page and line, as compilers print them."""
        return f"{self.page}:{self.line}"

    @property
    def sha256(self) -> str:
        """Hash of the code and its expected output: the key of the GPU record."""
        return hashlib.sha256(f"{self.code}\0{self.expected}".encode()).hexdigest()

    @property
    def needs_gpu(self) -> bool:
        """Whether the block runs on a GPU only."""
        return "gpu" in self.info.split()

    def unexpected_output(self, printed: str) -> str | None:
        """Returns a message if `printed` differs from the expected output, else None.

        Whitespace is normalized, and `...` in the expected output matches any text, as in doctest.
        """
        if self.expected is None or doctest.OutputChecker().check_output(self.expected, printed, OUTPUT_FLAGS):
            return None
        return f"{self.name}: printed\n{printed}\nbut the page expects\n{self.expected}"
