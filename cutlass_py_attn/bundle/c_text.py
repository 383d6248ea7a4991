"""C text: the template environment of the generated C sources, and the rules of a manifest as C expressions.

A manifest has texts and names of elsewhere: of the artifacts that were exported, and of registered score terms. The
filters `text` and `comment` keep each inside of its string or comment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cutlass_py_attn import extras
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch import split_kv
from cutlass_py_attn.launch.expressions import Call, Expr, Name, Number, Operation, parse

TEMPLATES: Final = Path(__file__).with_name("templates")
_CHECKED: Final = {"+": "add", "-": "sub", "*": "mul"}  # C functions for integers
_CANNOT_FAIL: Final = ("min", "max", "step")  # functions of rules that do not report a number that does not fit

Json = Mapping[str, Any]


def environment(name: str, purpose: str, field: Callable[[str], str] = "c->{}".format) -> Any:
    """Returns the jinja2 environment of the templates; NotSupported if jinja2 is not installed.

    name: prefix of the C functions. purpose: what is written, for the error.
    field: returns the C expression of an input or pointer by its name
    """
    try:
        import jinja2
    except ImportError as error:
        raise NotSupported(f"{purpose} needs jinja2: {extras.remedy('cli')}") from error
    loader = jinja2.FileSystemLoader(TEMPLATES)
    made = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    made.filters["c"] = lambda rule, each, target: Rules(name, each, target, field).in_c(rule)
    made.filters["fails"] = lambda rule, each, target: Rules(name, each, target, field).fails(rule)
    made.filters |= {"text": text, "comment": comment, "field": field}
    return made


def sizes(targets: Iterable[Json]) -> dict[str, Any]:
    """Returns what the shared templates declare arrays with, for these targets of a manifest."""
    found = list(targets)
    maps = (sum(len(launch["tensor_maps"]) for launch in target["launches"]) for target in found)
    return {
        "most_entries": max(len(target["launches"]) for target in found),
        "most_maps": max(1, *maps),
        "most_bytes": max(target["struct"]["bytes"] for target in found),
        "max_splits": split_kv.MAX_SPLITS,
        "block_tiles": split_kv.SPLIT_OVERHEAD_TILES,
        "counts_key_tiles": any("causal_key_tiles(" in target["preferred_when"] for target in found),
    }


def text(value: str) -> str:
    """Returns a C string literal."""
    plain = "".join(chr(byte) if chr(byte) not in '"\\?' and 32 <= byte < 127 else f"\\{byte:03o}" for byte in
                    value.encode(errors="replace"))  # fmt: skip
    return f'"{plain}"'


def comment(value: str) -> str:
    """Returns the text as a part of a comment, on one line and in ASCII."""
    plain = " ".join(value.encode("ascii", "replace").decode().split())
    printable = "".join(letter if letter.isprintable() and letter != "\\" else "?" for letter in plain)
    return printable.replace("*/", "* /").replace("/*", "/ *")


@dataclass(frozen=True, slots=True)
class _Term:
    """A C expression. is_float: whether it is a double, else an int64_t."""

    text: str
    is_float: bool = False

    @property
    def as_double(self) -> str:
        return self.text if self.is_float else f"(double){self.text}"


class Rules:
    """The rules of a target as C expressions, for functions with `num_sms`, `c`, `invalid` and the definitions."""

    def __init__(self, prefix: str, exported: Json, target: Json, field: Callable[[str], str]) -> None:
        self._prefix = prefix
        self._names = {"num_sms": _Term("num_sms")}
        self._names |= {name: _Term(field(name), it["type"] == "f64") for name, it in exported["inputs"].items()}
        self._names |= {item["name"]: _Term(item["name"]) for item in target["definitions"]}

    def in_c(self, rule: str) -> str:
        """Returns the rule as a C expression without overflow."""
        return self._term(parse(rule)).text

    def fails(self, rule: str) -> str:
        """Returns the C condition under which a call is refused: the rule is false, or a number does not fit."""
        found = self.in_c(rule)
        return f"!{found} || invalid" if "&invalid" in found else f"!{found}"

    def _term(self, rule: Expr) -> _Term:
        match rule:
            case Number(value):
                return _Term(repr(value) if value >= 0 else f"({value!r})", isinstance(value, float))
            case Name(name):
                return self._names[name]
            case Call(function, arguments):
                flag = [] if function in _CANNOT_FAIL else ["&invalid"]
                passed = ", ".join([*flag, *(self._term(argument).text for argument in arguments)])
                return _Term(f"{self._prefix}_{function}({passed})")
            case Operation(symbol, left, right):
                return self._operation(symbol, self._term(left), self._term(right))
        raise TypeError(f"{rule!r}: no expression of C")

    def _operation(self, symbol: str, a: _Term, b: _Term) -> _Term:
        is_comparison, is_float = symbol not in _CHECKED, a.is_float or b.is_float
        if is_float:
            return _Term(f"({a.as_double} {symbol} {b.as_double})", not is_comparison)
        if is_comparison:
            return _Term(f"({a.text} {symbol} {b.text})")
        return _Term(f"{self._prefix}_{_CHECKED[symbol]}(&invalid, {a.text}, {b.text})")
