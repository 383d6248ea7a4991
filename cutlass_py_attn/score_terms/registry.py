"""Registry: every score term by name; the place where the other packages read what a term says.

The five built-in terms are always registered. `register` adds a term for this process: its kernels have its name in
their symbol and its fields behind all others in their parameter struct, so that no other kernel changes.
"""

from __future__ import annotations

import hashlib
import inspect
import marshal
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.refusals import Refusal, refuse
from cutlass_py_attn.score_terms.alibi import Alibi
from cutlass_py_attn.score_terms.bias import Bias
from cutlass_py_attn.score_terms.dropout import DROPOUT
from cutlass_py_attn.score_terms.sinks import SINKS
from cutlass_py_attn.score_terms.softcap import SOFTCAP
from cutlass_py_attn.score_terms.term import TILE_TABLES, ScoreTerm

if TYPE_CHECKING:
    from cutlass_py_attn.problem.problem import Problem

# In the order in which the terms apply; registered terms apply behind them, in alphabetical order.
BUILT_IN: Final[tuple[ScoreTerm, ...]] = (SOFTCAP, Bias(), Alibi(), SINKS, DROPOUT)
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
# Words that symbols, problems or the parameter struct use for something else.
LAYOUTS: Final = ("grouped", "seqused", "varlen")  # features of a Problem that are no score terms
PAGED: Final = "paged"  # another one, which a kernel body has only if it says so
KV8: Final = "kv8"  # key and value of e4m3 beside a query of 16 bits, likewise
KV8_ROW: Final = "kv8row"  # with a scale of each row
KV8_TILE: Final = "kv8tile"  # a latent cache of e4m3 codes with scales of tiles of columns, and 16-bit columns behind
FLOAT16_OUTPUT: Final = "float16_output"  # of e4m3 operands, whose output is bfloat16 without it, likewise
OPTIONAL_LAYOUTS: Final = (KV8_TILE, KV8_ROW, KV8, PAGED, FLOAT16_OUTPUT)  # a name before those that it begins with
_UNREGISTERED: Final = frozenset((*LAYOUTS, *OPTIONAL_LAYOUTS, *(term.name for term in BUILT_IN)))
_WORDS: Final = ("full", "causal", "local", "to", "sum", "det", "query", "key", "value", "output", "logsumexp")
RESERVED: Final = frozenset((*LAYOUTS, *OPTIONAL_LAYOUTS, *_WORDS))

_registered: dict[str, ScoreTerm] = {}


def register(term: ScoreTerm) -> ScoreTerm:
    """Registers a score term, and returns it; NotSupported lists every reason to refuse it.

    Registered terms run in the sm80 kernels on every GPU and, up to head dim 256 forward and 128 backward, in the sm90
    kernels. No other kernel takes them.
    """
    reasons = _refusals(term)
    if reasons:
        raise NotSupported(reasons)
    _registered[term.name] = term
    return term


def unregister(name: str) -> ScoreTerm:
    """Removes a term that `register` added, and returns it; NotSupported if there is none of that name."""
    if name not in _registered:
        raise NotSupported(
            f"score term {name!r}: is not registered; registered terms are {', '.join(registered()) or 'none'}"
        )
    return _registered.pop(name)


def terms() -> tuple[ScoreTerm, ...]:
    """Returns every term, in the order in which they apply."""
    return (*BUILT_IN, *(_registered[name] for name in registered()))


def registered() -> tuple[str, ...]:
    """Returns the names of the terms that `register` added, in alphabetical order."""
    return tuple(sorted(_registered))


def unknown(given: Iterable[object]) -> Iterator[Refusal]:
    """Yields the names of terms that are not registered."""
    for name in given:
        if name not in _registered:
            rule = f"must be registered terms, {', '.join(registered()) or 'of which there is none'}"
            yield refuse("score_terms", name, rule, "call score_terms.register first")


def names() -> tuple[str, ...]:
    """Returns the names of all terms."""
    return tuple(term.name for term in terms())


def present(problem: Problem) -> tuple[ScoreTerm, ...]:
    """Returns the terms of a problem."""
    return tuple(term for term in terms() if term.is_present(problem))


def of_features(features: Collection[str]) -> tuple[ScoreTerm, ...]:
    """Returns the terms among the features of a Problem or a Build; NotSupported for a term that is not registered."""
    return (*(term for term in BUILT_IN if term.name in features), *registered_among(features))


def in_struct(features: Collection[str]) -> tuple[ScoreTerm, ...]:
    """Returns the terms with fields in the parameter struct: the built-in ones always, the others when used."""
    return (*BUILT_IN, *registered_among(features))


def registered_among(features: Collection[str]) -> tuple[ScoreTerm, ...]:
    """Returns the terms among the features that `register` added, in alphabetical order.

    The order decides the struct and the kernels, so that it must not depend on the order of registration. Raises
    NotSupported for a term that is not registered: a kernel without it would have the symbol of one with it.
    """
    if unknown := sorted({name for name in features if name not in _UNREGISTERED and name not in _registered}):
        raise NotSupported(
            f"score terms {', '.join(unknown)}: must be registered before kernels with them are planned, compiled or "
            "launched; call score_terms.register first"
        )
    return tuple(_registered[name] for name in registered() if name in features)


def tile_table(features: Collection[str], tables: Collection[str]) -> str:
    """Returns which of the tile tables the terms among the features ask for; "" for none."""
    wanted = {table for term in of_features(features) for table in term.tile_tables}
    return next((table for table in TILE_TABLES if table in wanted and table in tables), "")


def gradients() -> tuple[str, ...]:
    """Returns the operands of terms that the backward can write a gradient of, in alphabetical order."""
    return tuple(sorted(term.gradient for term in terms() if term.gradient))


def array_options() -> tuple[str, ...]:
    """Returns the fields of Problem that hold an array of a built-in term: bias, alibi_slopes, sinks."""
    return tuple(term.field for term in BUILT_IN if term.vector is not None or term.gradient)


def meaning(field: str) -> str:
    """Returns what a struct field or operand of a term is, in a few words; "" for a field of no term."""
    for term in terms():
        if field in dict(term.meanings):
            return dict(term.meanings)[field]
        if term.vector is not None and field == term.vector.name:
            return term.vector.meaning
    return ""


def source_digest(features: Iterable[str]) -> str:
    """Returns a digest of the code of the registered terms among the features; "" when there are none.

    It belongs to the key of compiled kernels, like the sources of this package.
    """
    used = registered_among(tuple(features))
    if not used:
        return ""
    total = hashlib.sha256()
    for term in used:
        total.update(f"{term.name}\0{sorted(vars(term).items())!r}\0".encode())
        total.update(hashlib.sha256(_source(type(term))).digest())
    return total.hexdigest()


def _source(cls: type) -> bytes:
    """The file of a class; the code of its methods for a class without a file, as of an interactive session."""
    try:
        return Path(inspect.getfile(cls)).read_bytes()
    except (OSError, TypeError):
        functions = (value for value in vars(cls).values() if inspect.isfunction(value))
        return b"\0".join(marshal.dumps(function.__code__) for function in functions)


def _refusals(term: ScoreTerm) -> list[str]:
    """Every reason to refuse a term that is to be registered."""
    what = f"score term {term.name!r}"
    if not isinstance(term.name, str) or not _NAME.fullmatch(term.name):
        return [f"{what}: the name must be lower-case letters, digits and single underscores; rename it"]
    if term.name in names() or term.name in RESERVED:
        return [f"{what}: the name is taken; choose another, or unregister the term first"]
    found = []
    if term.vector is None or term.vector.name != term.name:
        found.append(f"{what}: vector must be a VectorOperand of the same name, which a call passes; set it")
    else:
        fields = {term.vector.name, *filter(None, (term.vector.batch_field,))}
        if missing := sorted(fields - set(term.struct.addresses)):
            found.append(f"{what}: struct.addresses lacks {', '.join(missing)}; add the fields of the vector")
    taken = {field for other in terms() for field, _ in other.struct.kinds}
    if shared := sorted(taken & {field for field, _ in term.struct.kinds}):
        found.append(f"{what}: the struct fields {', '.join(shared)} belong to other terms; rename them")
    if term.field or term.gradient:
        found.append(f"{what}: field and gradient must be empty; only built-in terms have fields of Problem")
    if term.scales_products or term.has_derivative or not term.modifies_scores:
        found.append(f"{what}: must add to the scores; only a built-in term scales products, weights or the softmax")
    if hasattr(term, "kernels"):
        found.append(
            f"{what}: kernels = {term.kernels!r}: no kernel reads it, the planner chooses among those that take terms; "
            "delete it"
        )
    if unknown := sorted(set(term.tile_tables) - set(TILE_TABLES)):
        found.append(f"{what}: tile_tables has {', '.join(unknown)}; must be some of {', '.join(TILE_TABLES)}")
    return found
