"""Mutation operators: every small change of one Python file that a test should notice, found with libcst."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

COMPARISONS: Final[dict[type[cst.BaseCompOp], cst.BaseCompOp]] = {
    cst.LessThan: cst.LessThanEqual(),
    cst.LessThanEqual: cst.LessThan(),
    cst.GreaterThan: cst.GreaterThanEqual(),
    cst.GreaterThanEqual: cst.GreaterThan(),
    cst.Equal: cst.NotEqual(),
    cst.NotEqual: cst.Equal(),
    cst.Is: cst.IsNot(),
    cst.IsNot: cst.Is(),
    cst.In: cst.NotIn(),
    cst.NotIn: cst.In(),
}
ARITHMETIC: Final[dict[type[cst.BaseBinaryOp], cst.BaseBinaryOp]] = {
    cst.Add: cst.Subtract(),
    cst.Subtract: cst.Add(),
    cst.Multiply: cst.FloorDivide(),
    cst.Modulo: cst.FloorDivide(),
}
NAMES: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
BOOLEANS: Final = {"True": "False", "False": "True"}
STATEMENTS: Final = (cst.SimpleStatementLine, cst.BaseCompoundStatement)
NOT_CODE: Final = (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)  # never mutated
# A loop that never ends says nothing that a loop that never starts does not.
CONDITIONS: Final = {cst.While: ("False",), cst.If: ("True", "False"), cst.IfExp: ("True", "False")}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a file.

    id: the same for the same change wherever the line moves: of file, scope, operator, both texts and, if a scope
    has the change twice, its number there. scope: the function or class, "" at module level. statement: first and last
    line of the statement, or of the head of a compound one. at_import: whether imports execute it, as they do at module
    level and in the defaults of parameters. span: offsets in the text.
    """

    id: str
    file: str
    line: int
    statement: tuple[int, int]
    at_import: bool
    scope: str
    operator: str
    before: str
    after: str
    span: tuple[int, int]

    def applied(self, text: str) -> str:
        """Returns the file's text with the change."""
        start, end = self.span
        assert text[start:end] == self.before, f"{self.file}:{self.line} is not the text that was drawn from"
        return text[:start] + self.after + text[end:]


def mutants(file: str, text: str) -> list[Mutant]:
    """Returns every mutant of a file, in the order of the text."""
    wrapper = MetadataWrapper(cst.parse_module(text))
    finder = _Finder(file, text, wrapper.module)
    wrapper.visit(finder)
    return finder.numbered()


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, file: str, text: str, module: cst.Module) -> None:
        super().__init__()
        self.file, self.text, self.module = file, text, module
        self.starts = [0, *itertools.accumulate(len(line) for line in text.splitlines(keepends=True))]
        self.scope: list[str] = []
        self.statements: list[cst.SimpleStatementLine | cst.BaseCompoundStatement] = []
        self.found: list[Mutant] = []

    def numbered(self) -> list[Mutant]:
        """Returns the mutants with their ids."""
        seen: Counter[tuple[str, ...]] = Counter()
        named = []
        for each in self.found:
            key = (each.file, each.scope, each.operator, each.before, each.after)
            seen[key] += 1
            digest = hashlib.sha256("\0".join((*key, str(seen[key]))).encode()).hexdigest()
            named.append(dataclasses.replace(each, id=digest[:12]))
        return named

    def on_visit(self, node: cst.CSTNode) -> bool:
        """Adds the changes of a node; returns whether its children are code."""
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self.scope.append(node.name.value)
        if isinstance(node, STATEMENTS):
            self.statements.append(node)
        if isinstance(node, NOT_CODE) or (isinstance(node, cst.If) and "TYPE_CHECKING" in self._code(node.test)):
            return False
        for operator, old, new in _changes(node):
            self._add(operator, old, new if isinstance(new, str) else self._code(new))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
            self.scope.pop()
        if isinstance(original_node, STATEMENTS):
            self.statements.pop()

    def _lines(self, node: cst.SimpleStatementLine | cst.BaseCompoundStatement) -> tuple[int, int]:
        place = self.get_metadata(PositionProvider, node)
        assert isinstance(place, CodeRange)
        if isinstance(node, cst.SimpleStatementLine):
            return place.start.line, place.end.line
        inside = node.cases[0] if isinstance(node, cst.Match) else node.body
        body = self.get_metadata(PositionProvider, inside)
        assert isinstance(body, CodeRange)
        return place.start.line, max(place.start.line, body.start.line - 1)

    def _code(self, node: cst.CSTNode) -> str:
        if isinstance(node, cst.BaseExpression):
            node = node.with_changes(lpar=[], rpar=[])
        return self.module.code_for_node(node)

    def _add(self, operator: str, node: cst.CSTNode, after: str) -> None:
        place = self.get_metadata(PositionProvider, node)
        assert isinstance(place, CodeRange)
        start, end = (self.starts[each.line - 1] + each.column for each in (place.start, place.end))
        scope, before = ".".join(self.scope), self.text[start:end]
        *around, statement = self.statements
        at_import = not any(isinstance(each, cst.FunctionDef) for each in around)
        line, lines = place.start.line, self._lines(statement)
        self.found.append(Mutant("", self.file, line, lines, at_import, scope, operator, before, after, (start, end)))


Change = tuple[str, cst.CSTNode, cst.CSTNode | str]  # operator, the node that changes, and what it becomes


def _changes(node: cst.CSTNode) -> Iterator[Change]:
    """The changes of one node, without those of its children."""
    if isinstance(node, cst.Comparison):
        for number, target in enumerate(node.comparisons):
            changed = target.with_changes(operator=_spaced(target.operator, COMPARISONS[type(target.operator)]))
            comparisons = [changed if each == number else old for each, old in enumerate(node.comparisons)]
            yield "comparison", node, node.with_changes(comparisons=comparisons)
    elif isinstance(node, cst.BinaryOperation):
        yield from _arithmetic(node)
    elif isinstance(node, cst.BooleanOperation):
        other = cst.Or() if isinstance(node.operator, cst.And) else cst.And()
        yield "and, or", node, node.with_changes(operator=_spaced(node.operator, other))
    elif isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        yield "not dropped", node, node.expression
    elif isinstance(node, cst.If | cst.IfExp | cst.While):
        for constant in CONDITIONS[type(node)]:
            yield "condition", node.test, constant
    elif isinstance(node, cst.CompIf):
        yield "condition", node.test, "True"
    elif isinstance(node, cst.Integer):
        yield "constant", node, f"{node.evaluated_value + 1}"
        yield "constant", node, f"{node.evaluated_value - 1}"
    elif isinstance(node, cst.Name) and node.value in BOOLEANS:
        yield "boolean", node, BOOLEANS[node.value]
    elif isinstance(node, cst.Call):
        yield from _call(node)
    elif isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1:
        statement = node.body[0]
        is_call = isinstance(statement, cst.Expr) and isinstance(statement.value, cst.Call)
        if is_call or isinstance(statement, cst.Raise | cst.AugAssign):
            yield "statement dropped", statement, "pass"


def _arithmetic(node: cst.BinaryOperation) -> Iterator[Change]:
    if isinstance(node.left, cst.BaseString | cst.List | cst.Tuple):
        return
    other = ARITHMETIC.get(type(node.operator))
    if other is not None and not isinstance(node.right, cst.BaseString | cst.List | cst.Tuple):
        yield "arithmetic", node, node.with_changes(operator=_spaced(node.operator, other))
    if isinstance(node.operator, cst.FloorDivide):
        paren = {"lpar": [cst.LeftParen()], "rpar": [cst.RightParen()]}
        negated = cst.UnaryOperation(cst.Minus(), node.left.with_changes(**paren))
        yield "rounding up", node, cst.UnaryOperation(cst.Minus(), node.with_changes(left=negated, **paren))


def _call(node: cst.Call) -> Iterator[Change]:
    if isinstance(node.func, cst.Name) and node.func.value in NAMES:
        yield "min, max, any, all", node.func, NAMES[node.func.value]
    first, second = (*node.args[:2], None, None)[:2]
    if first is None or second is None or any(each.keyword or each.star for each in (first, second)):
        return
    if not first.value.deep_equals(second.value):
        swapped = [first.with_changes(value=second.value), second.with_changes(value=first.value), *node.args[2:]]
        yield "arguments swapped", node, node.with_changes(args=swapped)


def _spaced(old: cst.CSTNode, new: cst.CSTNode) -> cst.CSTNode:
    """The new operator with the white space of the old one."""
    names = ("whitespace_before", "whitespace_after")
    return new.with_changes(**{name: getattr(old, name) for name in names})
