"""Tests of calls that are split over devices: exact to one device, sharded as their operands, nothing gathered.

Four host devices run the custom call of each device's part: the NumPy reference stands in for the kernels.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.api.paged import Paged
from cutlass_py_attn.api.quantization import quantize_e4m3
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Window
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.reference import quantization
from tests.cases.distance_squared import distance_squared
from tests.support import fakes

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 8)  # as in test_jax.py, which may share the process
jax.config.update("jax_disable_most_optimizations", True)
jnp = jax.numpy

from cutlass_py_attn.jax import (  # noqa: E402
    attention,
    auto,
    export_checks,
    handler,
    mla_attention,
    partition,
    primitive,
)
from tests.support import xla_reference  # noqa: E402

P, NamedSharding, AxisType = jax.sharding.PartitionSpec, jax.sharding.NamedSharding, jax.sharding.AxisType
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
B, M, H, D = 4, 10, 8, 8
KEY = jax.random.key(0)
COLLECTIVES = re.compile(r"= (?:\(.*?\)|\S+) (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def kernels(build: Any) -> Any:
    """Kernels that no other module's programs share."""
    return fakes.artifact(build)


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The NumPy reference behind the custom call."""
    xla_reference.register()
    monkeypatch.setattr(primitive, "TARGET", xla_reference.TARGET)
    yield
    xla_reference.computed.clear()


def draw(number: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape, np.float32))


def operands(heads_key: int = 4, batch: int = B) -> tuple[Any, Any, Any]:
    return draw(1, batch, M, H, D), draw(2, batch, M, heads_key, D), draw(3, batch, M, heads_key, D)


def ours(*arrays: Any, **options: Any) -> Any:
    """Attention by the custom call, planned for an H200."""
    return attention(*arrays, **{"mask": Causal(), "kernels": kernels, "arch": "sm_90", **options})


def mesh_of(kind: Any, *sizes: int) -> Any:
    return jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(kind,) * len(sizes))


def put(array: Any, mesh: Any, spec: Any) -> Any:
    return jax.device_put(array, NamedSharding(mesh, spec))


def weights(shape: tuple[int, ...]) -> Any:
    return jnp.sin(jnp.arange(np.prod(shape))).reshape(shape)


@dataclass(frozen=True)
class Case:
    """terms: differentiable arrays. fixed: other options."""

    terms: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    heads_key: int = 4

    def both(self, query: Any, key: Any, value: Any, terms: Any, grad_output: Any) -> Any:
        """Returns the output and the gradients."""
        output, pull = jax.vjp(lambda q, k, v, t: ours(q, k, v, **t, **self.fixed), query, key, value, terms)
        return output, pull(grad_output)


DROPOUT: dict[str, Any] = {"dropout_p": 0.4, "dropout_key": KEY}
CASES = {
    "terms": Case({"bias": draw(4, 1, H, M, M), "sinks": draw(5, H)}, {"alibi_slopes": draw(6, H), "softcap": 3.0}),
    "terms of the batch": Case(
        {"bias": draw(4, B, 1, 1, M)}, {"alibi_slopes": draw(6, B, H), "scale": 0.3, "mask": Window(4, 2)}
    ),
    "dropout": Case({"bias": draw(4, 1, 1, M, M), "sinks": draw(5, H)}, {**DROPOUT, "mask": Full()}, H),
    "dropout, whole bias": Case({"bias": draw(4, B, H, M, M)}, {**DROPOUT, "deterministic": True}),
    "two key heads": Case({}, {"mask": CausalBottomRight()}, 2),
    "one key head": Case({}, DROPOUT, 1),
}
SPLITS = {"batch": (P("x"), (4,)), "heads": (P(None, None, "x"), (4,)), "both": (P("x", None, "y"), (2, 2))}
GRAD_OUTPUT = jnp.sin(jnp.arange(B * M * H * D)).reshape(B, M, H, D)


@functools.cache
def one_device(name: str) -> Any:
    case = CASES[name]
    return jax.jit(case.both)(*operands(case.heads_key), case.terms, GRAD_OUTPUT)


def expect_close(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5)


def expect_sharding(array: Any, mesh: Any, spec: Any) -> None:
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), array.sharding


def collectives(compiled: Any) -> list[str]:
    return COLLECTIVES.findall(compiled.as_text())


def parts_computed() -> set[tuple[int, int]]:
    """Returns (batch, query heads) of the calls that devices ran."""
    return {(problem.shape.batch, problem.shape.num_heads) for problem in xla_reference.computed}


def test_the_stand_in_is_the_reference() -> None:
    for case in CASES.values():
        arrays = operands(case.heads_key)
        expected = attention(*arrays, **{"mask": Causal(), **case.terms, **case.fixed}, backend="reference")
        expect_close(ours(*arrays, **case.terms, **case.fixed), expected)


@KINDS
@pytest.mark.parametrize("how", SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_split_calls_are_exact_and_gather_nothing(name: str, how: str, kind: Any) -> None:
    """Output and gradients are one device's, sharded as the operands; each device computes its part only."""
    case, (spec, sizes) = CASES[name], SPLITS[how]
    expected = one_device(name)
    mesh = mesh_of(kind, *sizes)
    parts_of_heads = sizes[-1] if how != "batch" else 1
    spec_key = spec if case.heads_key % parts_of_heads == 0 else P(spec[0])
    parts = (*spec, None, None)[:3:2]  # of batch and heads
    specs_of_terms = {
        name: P(*(part if size > 1 else None for part, size in zip(parts, array.shape, strict=False)))
        if name == "bias"
        else P(parts[1])
        for name, array in case.terms.items()
    }
    specs = spec, spec_key, spec_key, specs_of_terms, spec
    given = (*operands(case.heads_key), case.terms, GRAD_OUTPUT)
    arrays = jax.tree.map(lambda array, spec: put(array, mesh, spec), given, specs)
    with jax.set_mesh(mesh):
        compiled = jax.jit(case.both).lower(*arrays).compile()
        xla_reference.computed.clear()
        found = jax.block_until_ready(compiled(*arrays))
    expect_close(found, expected)
    if spec_key == spec or kind == EXPLICIT:  # else XLA chooses the sharding of the shared key heads' gradients
        assert collectives(compiled) == []
        jax.tree.map(lambda array, spec: expect_sharding(array, mesh, spec), found, (spec, specs[:4]))
    else:
        expect_sharding(found[1][0], mesh, spec)
    batch = B // (sizes[0] if how != "heads" else 1)
    one_by_one = parts_of_heads > 1 and "dropout_p" in case.fixed
    assert parts_computed() == {(1 if one_by_one else batch, H // parts_of_heads)}


HEADS = P(None, None, "x")


def loss(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return jnp.sum(jnp.sin(ours(query, key, value, **options)))


def run_split(
    function: Callable[..., Any], mesh: Any, arrays: Any, specs: Any, *, in_context: bool = True
) -> tuple[Any, list[str]]:
    """Returns the function's results, of arrays with these shardings, and the collectives of its program."""
    placed = [put(array, mesh, spec) for array, spec in zip(arrays, specs, strict=True)]

    def run() -> Any:
        compiled = jax.jit(function).lower(*placed).compile()
        xla_reference.computed.clear()
        return jax.block_until_ready(compiled(*placed)), collectives(compiled)

    if not in_context:
        return run()
    with jax.set_mesh(mesh):
        return run()


@KINDS
def test_lengths_of_sequences_are_on_every_device(kind: Any) -> None:
    starts = jnp.array([0, 4, 4, 15])
    arrays = (draw(1, 1, 16, H, D), draw(2, 1, 16, 4, D), draw(3, 1, 16, 4, D))
    slopes = {"alibi_slopes": draw(4, 3, H), "sequences": VariableLength(starts, starts, 11, 11)}
    gradients = jax.grad(functools.partial(loss, **slopes), (0, 1, 2))
    found, gathered = run_split(gradients, mesh_of(kind, 4), arrays, (HEADS,) * 3)
    expect_close(found, jax.jit(gradients)(*arrays))
    assert gathered == []
    assert parts_computed() >= {(3, H // 4)}


def latent_cache(heads_key: int) -> dict[str, Any]:
    """Returns a latent cache of e4m3 codes: its three arrays."""
    rows = np.random.default_rng(7).standard_normal((B, M, heads_key, 576), np.float32).astype("bfloat16")
    codes, scale = quantization.quantise_latent(rows[..., :512])
    return {"cache": codes, "cache_scale": scale, "cache_rope": rows[..., 512:]}


def latent(query: Any, cache: dict[str, Any], **options: Any) -> Any:
    """Attention to a latent cache by the custom call."""
    return mla_attention(query, **cache, **{"scale": 0.05, "kernels": kernels, "arch": "sm_90", **options})


@KINDS
@pytest.mark.parametrize("heads_key", [1, 2])
@pytest.mark.parametrize("how", SPLITS)
def test_codes_of_a_latent_cache_are_split(how: str, heads_key: int, kind: Any) -> None:
    """Whole over the heads of query that share a key head, with scales and columns of 16 bits beside the codes."""
    spec, sizes = SPLITS[how]
    query, cache = draw(1, B, 2, H, 576).astype("bfloat16"), latent_cache(heads_key)
    names, of_cache = tuple(cache), spec if how == "batch" else P("x") if how == "both" else P()
    arrays = query, *cache.values()
    found, gathered = run_split(
        lambda query, *given: latent(query, dict(zip(names, given, strict=True))),
        mesh_of(kind, *sizes),
        arrays,
        (spec, *(of_cache for _ in names)),
    )
    np.testing.assert_array_equal(found, latent(query, cache, backend="reference"))
    assert gathered == []
    parts = (B // sizes[0] if how != "heads" else B, H // sizes[-1] if how != "batch" else H)
    assert parts_computed() == {parts}
    assert all(problem.key_rope is not None for problem in xla_reference.computed)


@KINDS
def test_pages_of_codes_are_on_every_device(kind: Any) -> None:
    query, cache = draw(1, B, 2, H, 576).astype("bfloat16"), latent_cache(1)
    pools = {name: array[:, :8].reshape(2, 16, 1, -1) for name, array in cache.items()}  # pages of 16 rows
    names, table, lengths = tuple(pools), jnp.array([[1, 0], [0, 1], [1, 1], [0, 0]]), jnp.array([32, 17, 0, 3])

    def paged(query: Any, table: Any, lengths: Any, *given: Any, **options: Any) -> Any:
        sequences = Paged(table, lengths)
        return latent(query, dict(zip(names, given, strict=True)), sequences=sequences, **options)

    arrays = query, table, lengths, *pools.values()
    found, gathered = run_split(paged, mesh_of(kind, 4), arrays, (HEADS, *(P() for _ in arrays[1:])))
    np.testing.assert_array_equal(found, paged(*arrays, backend="reference"))
    assert gathered == []
    assert parts_computed() == {(B, H // 4)}


@pytest.mark.parametrize("granularity", ["tensor", "head", "batch_head"])
def test_scales_are_those_of_a_device_s_key_head(granularity: str) -> None:
    """Of two key heads that four devices read."""
    arrays = [np.asarray(draw(number, B, M, heads, 32)) for number, heads in ((1, H), (2, 2), (3, 2))]
    given = [quantize_e4m3(array, granularity=granularity, num_heads_key=2) for array in arrays]
    codes = [code for code, _ in given]
    scales = {f"{name}_scale": scale for name, (_, scale) in zip(("query", "key", "value"), given, strict=True)}
    found, _ = run_split(lambda *codes: ours(*codes, **scales), mesh_of(EXPLICIT, 4), codes, (HEADS, P(), P()))
    np.testing.assert_array_equal(found, ours(*codes, **scales, backend="reference"))
    assert parts_computed() == {(B, H // 4)}


def test_a_device_has_its_own_codes_inside_shard_map() -> None:
    query, cache = draw(1, B, 2, H, 576).astype("bfloat16"), latent_cache(1)
    mesh = mesh_of(AUTO, 2)
    split = jax.shard_map(latent, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_array_equal(split(query, cache), latent(query, cache, backend="reference"))


@KINDS
def test_a_registered_term_is_split(kind: Any) -> None:
    arrays = operands()
    with distance_squared() as term:
        for slopes in (draw(4, H) / 20, draw(5, B, H) / 20):
            gradients = jax.grad(functools.partial(loss, score_terms={term.name: slopes}), (0, 1, 2))
            expected = jax.jit(gradients)(*arrays)
            found, gathered = run_split(gradients, mesh_of(kind, 2, 2), arrays, (P("x", None, "y"),) * 3)
            expect_close(found, expected)
            assert gathered == []


@KINDS
@pytest.mark.parametrize("what", ["checkpoint", "scan", "vmap", "vmap over the split axis", "without a mesh context"])
def test_transformations_stay_split(what: str, kind: Any) -> None:
    def steps(query: Any, key: Any, value: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (ours(carry, key, value), None), query, None, length=2)[0].sum()

    def mapped(*arrays: Any) -> Any:
        return jnp.sin(jax.vmap(ours)(*(array.reshape(2, 2, *array.shape[1:]) for array in arrays))).sum()

    def one_by_one(*arrays: Any) -> Any:
        return jnp.sin(jax.vmap(lambda *each: ours(*(array[None] for array in each)))(*arrays)).sum()

    plain = {"checkpoint": jax.checkpoint(loss), "scan": steps, "vmap": mapped, "vmap over the split axis": one_by_one}
    gradients = jax.grad(plain.get(what, loss), (0, 1, 2))
    arrays = operands()
    mesh = mesh_of(kind, 2)
    found, gathered = run_split(gradients, mesh, arrays, (P("x"),) * 3, in_context="context" not in what)
    expected = jax.jit(gradients)(*arrays)
    expect_close(found, expected)
    assert gathered == []
    for array in found:
        expect_sharding(array, mesh, P("x"))


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)], ids=str)
def test_a_tensor_parallel_block_gathers_nothing(sizes: tuple[int, int]) -> None:
    """Weights over "y", tokens over "x": XLA learns from the projections that query, key and value are split."""
    mesh = mesh_of(AUTO, *sizes)
    width = 32
    shapes = ((width, H * D), (width, 4 * D), (width, 4 * D), (H * D, width))
    arrays = (draw(1, B, M, width), *(draw(n, *shape) / 8 for n, shape in enumerate(shapes, 2)))
    specs = (P("x"), P(None, "y"), P(None, "y"), P(None, "y"), P("y"))

    def block(tokens: Any, *weights: Any) -> Any:
        heads = ((tokens @ weight).reshape(B, M, -1, D) for weight in weights[:3])
        return jnp.sum(jnp.sin(ours(*heads).reshape(B, M, -1) @ weights[3]))

    gradients = jax.grad(block, (0, 1, 2, 3, 4))
    found, gathered = run_split(gradients, mesh, arrays, specs)
    assert gathered == []
    assert parts_computed() == {(B // sizes[0], H // sizes[1])}
    for array, spec in zip(found, specs, strict=True):
        expect_sharding(array, mesh, spec)
    for one, other in zip(found, jax.jit(gradients)(*arrays), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-4)


def test_one_split_operand_splits_the_call() -> None:
    """Of query or of key, whichever; the other is whole on every device."""
    arrays = operands()
    for kind in (AUTO, EXPLICIT):
        for specs in ((P("x"), P(), P()), (P(), P("x"), P("x"))):
            found, gathered = run_split(ours, mesh_of(kind, 4), arrays, specs)
            expect_close(found, ours(*arrays))
            assert gathered == []
            expect_sharding(found, mesh_of(kind, 4), P("x"))


def test_an_auto_mesh_gathers_what_cannot_be_split() -> None:
    """Rows, and a batch that the devices do not divide."""
    arrays = operands()
    found, gathered = run_split(ours, mesh_of(AUTO, 2), arrays, (P(None, "x"),) * 3)
    expect_close(found, ours(*arrays))
    assert set(gathered) == {"all-gather"}

    def of_three(*arrays: Any) -> Any:
        return ours(*(jax.lax.with_sharding_constraint(2 * array, P("x")) for array in arrays))

    arrays = operands(batch=3)
    expect_close(run_split(of_three, mesh_of(AUTO, 2), arrays, (P(),) * 3)[0], ours(*(2 * array for array in arrays)))


@KINDS
def test_inside_shard_map_a_device_has_its_own_call(kind: Any) -> None:
    """Lengths of sequences too are a device's own there."""
    starts = jnp.array([[0, 3, 10], [0, 0, 8]])
    arrays = (draw(1, 2, 10, H, D), draw(2, 2, 10, 4, D), draw(3, 2, 10, 4, D))

    def packed(query: Any, key: Any, value: Any, starts: Any) -> Any:
        return ours(query, key, value, sequences=VariableLength(starts[0], starts[0], 10, 10))

    expected = jnp.concatenate([packed(*(each[i : i + 1] for each in (*arrays, starts))) for i in range(2)])
    mesh = mesh_of(kind, 2)
    sharded = jax.shard_map(packed, mesh=mesh, in_specs=(P("x"),) * 4, out_specs=P("x"))
    found, gathered = run_split(sharded, mesh, (*arrays, starts), (P("x"),) * 4)
    expect_close(found, expected)
    assert gathered == []


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_whole_operands_inside_shard_map(check_vma: bool) -> None:
    """A bias and sinks that all devices share, beside a query of each device's own: JAX sums their gradients."""
    terms = {"bias": draw(4, 1, H, M, M), "sinks": draw(5, H)}

    def total(arrays: Any, terms: Any, split: bool) -> Any:
        attend: Any = lambda arrays, terms: ours(*arrays, **terms)  # noqa: E731
        if split:
            specs = (P("x"),) * 3, {"bias": P(), "sinks": P()}
            attend = jax.shard_map(attend, mesh=mesh_of(AUTO, 4), in_specs=specs, out_specs=P("x"), check_vma=check_vma)
        return jnp.sum(jnp.sin(attend(arrays, terms)))

    found, expected = (jax.grad(total, (0, 1))(operands(), terms, split) for split in (True, False))
    expect_close(found, expected)


def test_the_reference_is_split_on_an_explicit_mesh() -> None:
    """By its callback. An Auto mesh gives the callback whole arrays."""
    gradients = jax.grad(functools.partial(loss, backend="reference"), (0, 1, 2))
    arrays = operands()
    for kind in (AUTO, EXPLICIT):
        found, _ = run_split(gradients, mesh_of(kind, 2), arrays, (P("x"),) * 3)
        expect_close(found, jax.jit(gradients)(*arrays))


def test_a_program_of_an_explicit_mesh_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitive, "TARGET", handler.TARGET)
    mesh = mesh_of(EXPLICIT, 2)
    with jax.set_mesh(mesh):
        arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P("x"))) for a in operands()]
        program = jax.export.export(jax.jit(ours), platforms=["cuda"], disabled_checks=export_checks())(*arrays)
    assert program.nr_devices == 2
    assert jax.export.deserialize(program.serialize()).out_avals[0].shape == (B, M, H, D)


def test_jax_caches_different_calls_apart() -> None:
    """The text of a program, without the address that JAX's cache removes, says which call it is."""

    def text(**options: Any) -> str:
        mesh = mesh_of(AUTO, 2)
        arrays = [put(array, mesh, P("x")) for array in operands()]
        program = jax.jit(lambda *given: ours(*given, **options)).lower(*arrays).as_text()
        assert program.count("CustomSPMDPartitioning") == 1
        return re.sub(r'backend_config = "\d+"', "", program)

    assert text() == text()
    assert len({text(), text(mask=Full()), text(softcap=2.0), text(arch="sm_80")}) == 4


def test_without_shardy_every_device_computes_the_whole_call() -> None:
    """As XLA does with every custom call; JAX deprecates that partitioner."""
    arrays = operands()
    expected = ours(*arrays)
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        found, _ = run_split(ours, mesh_of(AUTO, 2), arrays, (P("x"),) * 3)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    expect_close(found, expected)
    assert parts_computed() == {(B, H)}


# Refused calls


def refusals(function: Callable[..., Any], mesh: Any, arrays: Any, specs: Any) -> str:
    """Returns the text of the error when the function is traced."""
    placed = [put(array, mesh, spec) for array, spec in zip(arrays, specs, strict=True)]
    with jax.set_mesh(mesh), pytest.raises(NotSupported) as caught:
        jax.jit(function).trace(*placed)
    assert all(re.fullmatch(r"(?s).+: .*must .+; .+", reason) for reason in caught.value.reasons)
    return str(caught.value)


EIGHT_OF_SIX = (draw(1, 2, M, 12, D), draw(2, 2, M, 6, D), draw(3, 2, M, 6, D))


def test_what_an_explicit_mesh_cannot_split_is_refused_when_traced() -> None:
    mesh, square, arrays = mesh_of(EXPLICIT, 4), mesh_of(EXPLICIT, 2, 2), operands()
    rows = refusals(ours, mesh_of(EXPLICIT, 2), arrays, (P(None, "x"), P(), P()))
    assert rows == (
        "query is split over x in axis 1 (num_queries): must be whole there, for only batch and heads can be split; "
        "call jax.sharding.reshard(query, jax.P(None, None, None, None))"
    )
    found = refusals(ours, square, arrays, (P("x", None, None, "y"), P("x"), P("x")))
    assert found.startswith("query is split over y in axis 3 (head_dim)")
    assert found.endswith("jax.P('x', None, None, None))")
    found = refusals(ours, mesh, arrays, (HEADS, P("x"), P()))
    assert found.startswith("mesh axis x splits the batch of key and the heads of query")
    found = refusals(ours, square, arrays, (P("x"), P("y"), P("x")))
    assert "batch of query split over x, of key over y" in found or "batch of key split over y, of query" in found
    found = refusals(ours, mesh, EIGHT_OF_SIX, (HEADS, P(), P()))
    assert found.startswith("heads are split over x (4 devices), key has 6 heads and query 12")
    assert "repeat key and value to 12 heads with jax.numpy.repeat(key, 2, axis=2)" in found
    bias = draw(4, 1, 1, M, M)
    found = refusals(
        lambda *a: ours(*a[:3], bias=a[3]), mesh_of(EXPLICIT, 2), (*arrays, bias), (P(),) * 3 + (P(None, None, "x"),)
    )
    assert found.startswith("bias is split over x in axis 2 (num_queries)")


def test_the_remedy_for_too_few_key_heads() -> None:
    query, key, value = EIGHT_OF_SIX

    def repeated(query: Any, key: Any, value: Any) -> Any:
        key, value = (jax.sharding.reshard(jnp.repeat(array, 2, axis=2), HEADS) for array in (key, value))
        return ours(query, key, value)

    found, _ = run_split(repeated, mesh_of(EXPLICIT, 4), (query, key, value), (HEADS, P(), P()))
    expect_close(found, ours(query, key, value))


def test_what_an_auto_mesh_cannot_split_is_refused_when_compiled() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"heads are split over x \(4 devices\), key has 6 heads"):
        run_split(ours, mesh_of(AUTO, 4), EIGHT_OF_SIX, (HEADS, P(), P()))


@KINDS
def test_dropout_of_several_sequences_is_refused_over_heads(kind: Any) -> None:
    starts = jnp.array([0, 4, 16])
    arrays = (draw(1, 1, 16, H, D),) * 3

    def one_and_two(*given: Any, count: int = 2) -> Any:
        sequences = VariableLength(starts[-count - 1 :], starts[-count - 1 :], 16, 16)
        return ours(*given, sequences=sequences, **DROPOUT)

    with pytest.raises((NotSupported, jax.errors.JaxRuntimeError), match="over x with dropout and 2 sequences"):
        run_split(one_and_two, mesh_of(kind, 2), arrays, (HEADS,) * 3)
    starts = jnp.array([0, 16])
    one = functools.partial(one_and_two, count=1)
    expect_close(run_split(one, mesh_of(kind, 2), arrays, (HEADS,) * 3)[0], one(*arrays))


def test_meshes_that_leave_an_auto_axis_are_refused() -> None:
    arrays = operands()
    some = functools.partial(jax.shard_map, in_specs=(P("x"),) * 3, out_specs=P("x"), axis_names={"x"})
    found = refusals(some(ours), mesh_of(AUTO, 2, 2), arrays, (P("x"),) * 3)
    assert found.startswith("attention is inside jax.shard_map over x, and the mesh has the Auto axis y: must")
    mixed = jax.make_mesh((2, 2), ("x", "y"), axis_types=(EXPLICIT, AUTO))
    found = refusals(ours, mixed, arrays, (P("x"),) * 3)
    assert found.startswith("the mesh has the Auto axis y, and its Explicit axis x splits the call: both must")
    one = jax.make_mesh((2, 1), ("x", "y"), axis_types=(EXPLICIT, AUTO))
    expect_close(run_split(ours, one, arrays, (P("x"),) * 3)[0], ours(*arrays))


# Parts


def split(**changes: Any) -> partition.Split:
    problem, _ = fakes.plan_of("forward")
    return partition.Split(problem, **{"batch": (), "heads": (), "sizes": (("x", 3), ("y", 2)), **changes})


def test_random_numbers_of_parts_are_those_of_one_device() -> None:
    """Also beyond 32 bits, in index and offset."""
    problem, _ = fakes.plan_of("forward", shape=fakes.SHAPE)
    shape = problem.shape
    words = split(heads=("x",))._first_words().astype(np.uint64)
    for item in range(shape.batch):
        for head in range(shape.num_heads):
            first = (item * shape.num_heads + head) * shape.num_queries * shape.num_keys
            assert int(words[item, head, 0]) | int(words[item, head, 1]) << 32 == first
    for offset, more in ((0, 5), (2**32 - 1, 1), (2**64 - 1, 2), (7, 2**40 + 3)):
        pairs = [jnp.array([n & 0xFFFFFFFF, n >> 32], jnp.uint32) for n in (offset, more)]
        found = np.asarray(partition._plus(jnp.concatenate([jnp.array([8, 9], jnp.uint32), pairs[0]]), pairs[1]))
        assert found.view(np.uint64).tolist() == [8 | 9 << 32, (offset + more) % 2**64]


def test_xla_may_split_over_a_part_of_a_mesh_axis() -> None:
    """The mesh's axis of six devices splits the batch in two, then the heads in three; and the other way round."""
    problem, _ = fakes.plan_of("forward")

    class Sharding:
        device_set = range(6)

        def __init__(self, starts: Any) -> None:
            self.starts = starts

        def devices_indices_map(self, shape: tuple[int, ...]) -> Any:
            return {i: (slice(3 * b, None), slice(None), slice(2 * h, None)) for i, (b, h) in enumerate(self.starts)}

    class Operand:
        shape = (2, 200, 3, 64)

        def __init__(self, starts: Any) -> None:
            self.sharding = Sharding(starts)

    class Devices:
        empty, axis_names = False, ("x",)
        devices = np.arange(6)

    for starts in ([(i // 3, i % 3) for i in range(6)], [(i % 2, i // 2) for i in range(6)]):
        for mesh in (Devices, type("Empty", (), {"empty": True})):
            found, sizes = _split_of(problem, mesh, Operand(starts))
            assert found.count(found.batch) == 2
            assert found.count(found.heads) == 3
            assert sizes == tuple(size for _, size in found.sizes)
            assert partition._shown(found.batch) == ("x" if mesh is Devices else "devices")
    with pytest.raises(NotSupported, match="must split batch and heads over axes of a mesh"):
        _split_of(problem, Devices, Operand([(0, 0), (1, 0), (1, 0), (0, 0), (0, 0), (0, 0)]))


def _split_of(problem: Any, mesh: Any, operand: Any) -> Any:
    """Calls `auto.split_of` with numbers in place of devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "Mesh", lambda devices, names: devices.shape)
        return auto.split_of(problem, mesh, operand)


def test_the_parts_of_a_mesh_axis_are_few() -> None:
    """Equal factors have one order: 4096 devices have twelve of them, and 12! orders of their places."""
    start = time.monotonic()
    assert list(auto._refinements((4096, 12))) == [((2,) * 12, order) for order in ((2, 2, 3), (2, 3, 2), (3, 2, 2))]
    assert list(auto._refinements((1, 6))) == [((), (2, 3)), ((), (3, 2))]
    assert time.monotonic() - start < 20, "12! orders take minutes"


@pytest.mark.parametrize(
    ("starts", "axes"),
    [
        ([[0, 2], [4, 6]], ("x", "y")),
        ([[0, 4], [2, 6]], ("y", "x")),
        ([[0, 4], [0, 4]], ("y",)),
        ([[0, 0], [0, 0]], ()),
        ([[0, 2], [6, 4]], None),
    ],
)
def test_axes_along_which_parts_start(starts: list[list[int]], axes: tuple[str, ...] | None) -> None:
    assert auto._axes_that_split(np.array(starts), ("x", "y")) == axes


@pytest.mark.parametrize(
    ("name", "is_split"),
    [
        ("bf16_d64_q20_s30_b2_h4_causal_dropout0.3", True),
        ("bf16_d64_n30x30,20_h4_causal", True),
        ("bf16_d64_n30x30_h4_causal_dropout0.3", True),
        ("bf16_d64_n30x30,20_h4_causal_dropout0.3", False),
    ],
)
def test_only_dropout_of_several_sequences_has_heads_whole(name: str, is_split: bool) -> None:
    problem = parse(name).problem("forward")
    operands = {tensor: getattr(problem, tensor).shape for tensor in ("query", "key", "value")}
    text, options = auto.rule(problem, operands, {"output": problem.output.shape})
    heads = text.split(", ")[0].split()[2]
    assert (heads not in options["need_replication_factors"]) == is_split


def test_the_digest_of_sources_is_that_of_the_package_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "__file__", str(tmp_path / "package" / "jax" / "auto.py"))
    inside, outside = tmp_path / "package" / "kernel.py", tmp_path / "other.py"
    (tmp_path / "package" / "jax").mkdir(parents=True)
    found = []
    for path, text in ((inside, "1"), (outside, "1"), (outside, "2"), (inside, "2")):
        path.write_text(text)
        found.append(auto._sources.__wrapped__())
    assert [one == other for one, other in itertools.pairwise(found)] == [True, True, False]
