"""Tests of ranges of keys in JAX programs, beside attention in jax.numpy with a dense bias of -inf."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window
from tests.support.refusals import expect_raised

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # XLA compiles in half the time
jnp = jax.numpy

from cutlass_py_attn.jax import (  # noqa: E402
    attention,
    context_parallel_attention,
    dot_product_attention,
    export_checks,
    flax_attention,
)
from tests.support import xla_reference  # noqa: E402
from tests.support.masked_programs import (  # noqa: E402
    BATCH,
    DIM,
    HEADS,
    KEYS,
    ROWS,
    SPLITS,
    Arrays,
    by_kernels,
    calls_in,
    draw,
    expect_close,
    loss,
    operands,
    softmax_attention,
)

P, NamedSharding, AxisType = jax.sharding.PartitionSpec, jax.sharding.NamedSharding, jax.sharding.AxisType
ALL = (0, 1, 2)
AXES = {"all": (1, 1), "batch": (BATCH, 1), "heads": (1, HEADS), "both": (BATCH, HEADS)}


def edges(number: int, *shape: int) -> tuple[Any, Any]:
    """Starts and ends of ranges (..., ROWS), some of which are empty, and some reach past the keys."""
    random = np.random.default_rng(number)
    start = random.integers(-3, KEYS, (*shape, ROWS))
    end = start + random.integers(-1, KEYS, start.shape)
    start[..., 3], end[..., 3] = 5, 5
    return start.astype(np.int32), end.astype(np.int32)


def dense_bias(start: Any, end: Any, band: Mask) -> Any:
    """The ranges within a band as a bias (..., ROWS, KEYS) of 0 and -inf."""
    key = np.arange(KEYS)
    seen = (jnp.asarray(start)[..., None] <= key) & (key < jnp.asarray(end)[..., None])
    return jnp.where(seen & band.materialise(ROWS, KEYS), 0.0, -jnp.inf)


def ours(query: Any, key: Any, value: Any, ranges: KeyRanges, **options: Any) -> Any:
    return attention(query, key, value, mask=ranges, backend="reference", **options)


def theirs(query: Any, key: Any, value: Any, ranges: KeyRanges) -> Any:
    return softmax_attention(query, key, value, dense_bias(ranges.key_start, ranges.key_end, ranges.band))[0]


OPERANDS = operands()
RANGES = KeyRanges(*edges(7, BATCH, HEADS), Causal())
BANDS = {"full": Full(), "causal": Causal(), "window": Window(4, 3), "bottom right": CausalBottomRight(5)}


# One call


@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("band", BANDS)
def test_output_logsumexp_and_gradients(band: str, axes: str, is_jitted: bool) -> None:
    ranges = KeyRanges(*edges(8, *AXES[axes]), BANDS[band])

    def run(attend: Callable[..., Any], *arrays: Any) -> Any:
        (output, logsumexp), pull = jax.vjp(attend, *arrays)
        grad_logsumexp = jnp.where(jnp.isfinite(logsumexp), jnp.cos(output).sum(-1).swapaxes(1, 2), 0)
        return output, logsumexp, pull((jnp.cos(output), grad_logsumexp))

    found = functools.partial(run, lambda *arrays: ours(*arrays, ranges, return_logsumexp=True))
    bias = dense_bias(ranges.key_start, ranges.key_end, ranges.band)
    wanted = functools.partial(run, lambda *arrays: softmax_attention(*arrays, bias))
    expect_close((jax.jit(found) if is_jitted else found)(*OPERANDS), jax.jit(wanted)(*OPERANDS))


def test_score_terms_beside_ranges() -> None:
    """A bias, whose gradient sees the ranges too, and ranges for each head."""
    ranges, bias = KeyRanges(*edges(9, 1, HEADS), Window(6, 6)), draw(20, 1, HEADS, ROWS, KEYS)

    def expected(query: Any, key: Any, value: Any, bias: Any) -> Any:
        hidden = dense_bias(ranges.key_start, ranges.key_end, ranges.band)
        return softmax_attention(query, key, value, hidden + bias, 0.3)[0]

    found = functools.partial(
        loss, lambda query, key, value, bias: ours(query, key, value, ranges, bias=bias, scale=0.3)
    )
    arguments = (*OPERANDS, bias)
    expect_close(
        jax.jit(jax.value_and_grad(found, range(4)))(*arguments),
        jax.jit(jax.value_and_grad(functools.partial(loss, expected), range(4)))(*arguments),
    )


# Ranges as an argument: a pytree


def test_ranges_are_a_pytree_of_two_arrays() -> None:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(RANGES)]
    assert paths == [".key_start", ".key_end"]
    leaves, tree = jax.tree.flatten(RANGES)
    assert jax.tree.unflatten(tree, leaves).band == Causal()
    assert (
        jax.tree.flatten(KeyRanges(*edges(1, 1, 1), Causal(np.int64(3))))[1]
        == jax.tree.flatten(KeyRanges(*edges(2, 1, 1), Causal(3)))[1]
    )
    assert jax.tree.flatten(KeyRanges(*leaves, Causal(3)))[1] != tree
    shapes = jax.eval_shape(lambda ranges: ranges, RANGES)
    assert isinstance(shapes, KeyRanges)
    assert shapes.key_end.shape == (BATCH, HEADS, ROWS)


def test_one_program_computes_with_all_values() -> None:
    """Another band or another shape of the arrays is another program."""
    attend = jax.jit(ours)
    shapes = (BATCH, HEADS), (BATCH, HEADS), (BATCH, HEADS), (1, HEADS), (1, HEADS)
    bands, sizes = (Causal(), Causal(), Full(), Full(), Full()), (1, 1, 2, 3, 3)
    for number, (shape, band, size) in enumerate(zip(shapes, bands, sizes, strict=True)):
        ranges = KeyRanges(*edges(number, *shape), band)
        expect_close(attend(*OPERANDS, ranges), theirs(*OPERANDS, ranges))
        assert attend._cache_size() == size


def test_two_calls_that_differ_in_their_ranges() -> None:
    """In one program, forward and backward, eager and jitted; one of them has none."""
    others = (
        KeyRanges(RANGES.key_start, RANGES.key_end),
        KeyRanges(RANGES.key_start, jnp.minimum(RANGES.key_end, 9), Causal()),
        KeyRanges(RANGES.key_start[:, :1], RANGES.key_end[:, :1], Causal()),
        Causal(),
    )

    def both(attend: Callable[..., Any], other: Any, *arrays: Any) -> Any:
        return loss(attend, *arrays, RANGES) + 2 * loss(attend, *arrays, other)

    def expected(query: Any, key: Any, value: Any, mask: Any) -> Any:
        if isinstance(mask, KeyRanges):
            return theirs(query, key, value, mask)
        return softmax_attention(query, key, value, jnp.where(mask.materialise(ROWS, KEYS), 0.0, -jnp.inf))[0]

    for other in others:
        found = jax.value_and_grad(functools.partial(both, ours, other), ALL)
        wanted = jax.jit(jax.value_and_grad(functools.partial(both, expected, other), ALL))(*OPERANDS)
        expect_close(found(*OPERANDS), wanted)
        expect_close(jax.jit(found)(*OPERANDS), wanted)


def test_ranges_that_a_program_computes() -> None:
    """Documents of traced lengths, of which some are 0."""

    def documents(lengths: Any) -> KeyRanges:
        ends = jnp.cumsum(lengths)
        number = jnp.searchsorted(ends, jnp.arange(ROWS), side="right")
        start, end = (jnp.pad(ends, (1, 0))[number + shift].astype(jnp.int32) for shift in (0, 1))
        return KeyRanges(start[None, None], end[None, None], Causal())

    @jax.jit
    def step(lengths: Any) -> Any:
        return jax.value_and_grad(functools.partial(loss, ours), ALL)(*OPERANDS, documents(lengths))

    for lengths in ([3, 7], [1, 9], [0, 10]):
        array = np.array(lengths, np.int32)
        wanted = jax.value_and_grad(functools.partial(loss, theirs), ALL)(*OPERANDS, documents(array))
        expect_close(step(array), wanted)
    assert step._cache_size() == 1


def test_integers_beyond_int32_are_cut_before_jax_reads_them() -> None:
    start, end = edges(3, 1, 1)
    expected = ours(*OPERANDS, KeyRanges(start, np.full_like(end, KEYS)))
    wide = KeyRanges(start.astype(np.int64), np.full(end.shape, 2**40))
    expect_close(ours(*OPERANDS, wide), expected)
    expect_close(jax.jit(ours)(*OPERANDS, wide), expected)
    unsigned = KeyRanges(np.maximum(start, 0).astype(np.uint8), np.full(end.shape, 2**64 - 1, np.uint64))
    expect_close(jax.jit(ours)(*OPERANDS, unsigned), expected)


# Transformations


IN_AXES = {
    "ranges": (None, 0, 0),
    "query": (0, None, None),
    "both": (0, 0, 0),
    "starts": (None, 0, None),
    "ends of every query": (0, None, 0),
}


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("what", IN_AXES)
def test_vmap(what: str, axes: str) -> None:
    """Element i is the result of element i, forward and backward; the mapped axis joins the batch in one call."""
    query_axis, start_axis, end_axis = IN_AXES[what]
    query = draw(11, 3, *OPERANDS[0].shape) if query_axis == 0 else OPERANDS[0]
    sets = [edges(number, *AXES[axes]) for number in (12, 13, 14)]
    start, end = (
        np.stack(arrays) if axis == 0 else arrays[0]
        for arrays, axis in zip(zip(*sets, strict=True), (start_axis, end_axis), strict=True)
    )
    ranges = KeyRanges(start, end, Causal())

    def element(attend: Callable[..., Any], query: Any, ranges: KeyRanges) -> Any:
        return jax.value_and_grad(functools.partial(loss, attend), ALL)(query, *OPERANDS[1:], ranges)

    in_axes = query_axis, KeyRanges(start_axis, end_axis, Causal())
    mapped = jax.vmap(functools.partial(element, ours), in_axes)
    wanted = jax.jit(jax.vmap(functools.partial(element, theirs), in_axes))(query, ranges)
    assert calls_in(mapped, query, ranges) == 2
    expect_close(mapped(query, ranges), wanted)
    expect_close(jax.jit(mapped)(query, ranges), wanted)


def test_vmap_of_other_axes_and_of_two_axes() -> None:
    start, end = (np.moveaxis(edge, 0, 2) for edge in edges(15, 3, BATCH, 1))
    ranges = KeyRanges(start, end)
    in_axes = (None, None, None, KeyRanges(2, 2))
    expect_close(jax.vmap(ours, in_axes)(*OPERANDS, ranges), jax.vmap(theirs, in_axes)(*OPERANDS, ranges))
    arrays, ranges = operands(2, 3, batch=1), KeyRanges(*edges(16, 3, 1, HEADS))
    twice = [jax.jit(jax.vmap(jax.vmap(attend), (0, 0, 0, None)))(*arrays, ranges) for attend in (ours, theirs)]
    expect_close(*twice)


def layers(attend: Callable[..., Any], weights: Any, given: Any, ranges: KeyRanges) -> Any:
    """Layers of attention of a scan, which all have one mask; it is among what the scan carries."""

    def layer(carry: tuple[Any, KeyRanges], weight: Any) -> tuple[tuple[Any, KeyRanges], None]:
        rows, ranges = carry
        query = (rows @ weight).reshape(BATCH, ROWS, HEADS, DIM)
        return (rows + attend(query, *OPERANDS[1:], ranges).reshape(rows.shape), ranges), None

    (rows, _), _ = jax.lax.scan(layer, (given, ranges), weights)
    return jnp.sum(jnp.sin(rows))


@pytest.mark.parametrize("remat", ["plain", "remat", "policy"])
def test_layers_of_a_scan_with_one_mask(remat: str) -> None:
    policy = jax.checkpoint_policies.save_only_these_names("cutlass_py_attn") if remat == "policy" else None
    attend = ours if remat == "plain" else jax.checkpoint(ours, policy=policy)
    arguments = draw(30, 3, HEADS * DIM, HEADS * DIM) / 6, draw(31, BATCH, ROWS, HEADS * DIM)
    ranges = jax.tree.map(jnp.asarray, RANGES)
    found = jax.jit(jax.value_and_grad(functools.partial(layers, attend), (0, 1)))
    expect_close(
        found(*arguments, ranges),
        jax.jit(jax.value_and_grad(functools.partial(layers, theirs), (0, 1)))(*arguments, ranges),
    )


def test_an_integer_argument_of_a_gradient_has_none() -> None:
    ranges = jax.tree.map(jnp.asarray, RANGES)
    found = jax.jit(jax.grad(functools.partial(loss, ours), (0, 3), allow_int=True))(*OPERANDS, ranges)
    assert isinstance(found[1], KeyRanges)
    assert found[1].key_start.dtype == jax.dtypes.float0
    output, pull = jax.vjp(ours, *OPERANDS, ranges)
    of_ranges = pull(output)[3]
    assert of_ranges.key_end.dtype == jax.dtypes.float0


@pytest.mark.parametrize("axes", AXES)
def test_forward_mode_and_second_derivatives(axes: str) -> None:
    ranges = KeyRanges(*edges(17, *AXES[axes]), CausalBottomRight(6))
    directions = tuple(jnp.cos(3 * array) for array in OPERANDS)

    def derivatives(attend: Callable[..., Any], arrays: Arrays, ranges: KeyRanges) -> Any:
        def total(*arrays: Any) -> Any:
            return loss(attend, *arrays, ranges)

        tangents = jax.jvp(lambda *arrays: attend(*arrays, ranges), arrays, directions)
        of_gradient = jax.jvp(jax.grad(total, ALL), arrays, directions)

        def along(*arrays: Any) -> Any:
            pairs = zip(jax.grad(total, ALL)(*arrays), directions, strict=True)
            return sum((gradient * direction).sum() for gradient, direction in pairs)

        return tangents, of_gradient, jax.grad(along, ALL)(*arrays)

    found, wanted = (jax.jit(functools.partial(derivatives, attend))(OPERANDS, ranges) for attend in (ours, theirs))
    expect_close(found, wanted, 1e-4)


def test_tangents_of_mapped_ranges() -> None:
    start, end = edges(18, 3, BATCH, 1)

    def tangent(attend: Callable[..., Any], ranges: KeyRanges) -> Any:
        return jax.jvp(lambda *arrays: attend(*arrays, ranges), OPERANDS, OPERANDS)

    found, wanted = (
        jax.jit(jax.vmap(functools.partial(tangent, attend)))(KeyRanges(start, end)) for attend in (ours, theirs)
    )
    expect_close(found, wanted, 1e-4)


def test_custom_vjp_around_a_call() -> None:
    @jax.custom_vjp
    def attend(query: Any, ranges: KeyRanges) -> Any:
        return ours(query, *OPERANDS[1:], ranges)

    def forward(query: Any, ranges: KeyRanges) -> Any:
        return jax.vjp(lambda query: ours(query, *OPERANDS[1:], ranges), query)

    attend.defvjp(forward, lambda pull, cotangent: (2 * pull(cotangent)[0], None))
    found = jax.jit(jax.grad(lambda query: loss(attend, query, RANGES)))(OPERANDS[0])
    expect_close(found, 2 * jax.grad(functools.partial(loss, theirs))(*OPERANDS, RANGES))


# Several devices


def put(array: Any, mesh: Any, *axes: Any) -> Any:
    """The array on a mesh; an axis of size 1 is whole."""
    split = (axis if size > 1 else None for axis, size in zip(axes, array.shape, strict=False))
    return jax.device_put(array, NamedSharding(mesh, P(*split)))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("how", SPLITS)
def test_calls_that_a_mesh_splits(how: str, axes: str, kind: str, stand_in: None) -> None:
    """Each device has its batches and heads of the ranges, which are split like query or whole."""
    spec, sizes = SPLITS[how]
    mesh = jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(getattr(AxisType, kind),) * len(sizes))
    batch_axis, _, heads_axis = (*spec, None, None)[:3]
    heads_key_axis = None if how == "more than key heads" else heads_axis
    arrays, ranges = operands(dtype=np.float16), KeyRanges(*edges(19, *AXES[axes]), Causal())
    gradients = jax.value_and_grad(functools.partial(loss, by_kernels), ALL)
    expected = jax.jit(gradients)(*arrays, ranges)
    wide = (array.astype(np.float32) for array in arrays)
    expect_close(expected, jax.value_and_grad(functools.partial(loss, theirs), ALL)(*wide, ranges), 1e-2)
    for is_split in (True, False):
        placed = [
            put(arrays[0], mesh, batch_axis, None, heads_axis),
            *(put(array, mesh, batch_axis, None, heads_key_axis) for array in arrays[1:]),
            jax.tree.map(lambda edge: put(edge, mesh, *((batch_axis, heads_axis) if is_split else ())), ranges),  # noqa: B023
        ]
        with jax.set_mesh(mesh):
            program = jax.jit(gradients).lower(*placed).compile()
            xla_reference.computed.clear()
            found = jax.block_until_ready(program(*placed))
        expect_close(found, expected, 1e-2)
        (part,) = {problem.shape.range_edges for problem in xla_reference.computed}
        parts = mesh.shape.get(batch_axis, 1), mesh.shape.get(heads_axis, 1)
        assert part == (BATCH // parts[0], HEADS // parts[1], ROWS)
        whole = {problem.key_start.shape for problem in xla_reference.computed if problem.key_start is not None}
        assert whole == {tuple(min(size, most) for size, most in zip((*AXES[axes], ROWS), part, strict=True))}


def test_vmap_over_the_axis_of_an_explicit_mesh(stand_in: None) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    arrays, (start, end) = operands(2, dtype=np.float16), edges(21, 2, 1, HEADS)
    found = jax.vmap(jax.grad(functools.partial(loss, by_kernels), ALL))
    expected = jax.jit(found)(*arrays, KeyRanges(start, end))
    with jax.set_mesh(mesh):
        placed = [put(array, mesh, "x") for array in (*arrays, start, end)]
        expect_close(jax.jit(found)(*placed[:3], KeyRanges(*placed[3:])), expected, 1e-2)


def test_ranges_inside_shard_map(stand_in: None) -> None:
    """A device has ranges of its own batches; those of all batches are the same on every device."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    arrays = operands(dtype=np.float16)
    for axes, spec in (("batch", P("x")), ("heads", P())):
        ranges = KeyRanges(*edges(22, *AXES[axes]), Causal())
        split = jax.shard_map(by_kernels, mesh=mesh, in_specs=(*(P("x"),) * 3, spec), out_specs=P("x"))
        found, expected = (
            jax.jit(jax.grad(functools.partial(loss, attend), ALL))(*arrays, ranges) for attend in (split, by_kernels)
        )
        expect_close(found, expected, 1e-2)


@pytest.mark.parametrize("argument", ALL)
def test_the_gradient_of_one_operand(argument: int, stand_in: None) -> None:
    """Kernels with ranges compute those of all three."""
    arrays, ranges = operands(dtype=np.float16), KeyRanges(*edges(23, 1, HEADS), Causal())
    wide = tuple(array.astype(np.float32) for array in arrays)
    found = jax.jit(jax.grad(functools.partial(loss, by_kernels), argument))(*arrays, ranges)
    expect_close(found, jax.grad(functools.partial(loss, theirs), argument)(*wide, ranges), 1e-2)
    assert [problem.gradients for problem in xla_reference.computed if problem.gradients] == [("query", "key", "value")]


def test_an_exported_program_takes_other_ranges() -> None:
    def attend(query: Any, key: Any, value: Any, start: Any, end: Any) -> Any:
        return by_kernels(query, key, value, KeyRanges(start, end, Causal()))

    shapes = [
        jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (*operands(dtype=jnp.bfloat16), *edges(1, 1, 1))
    ]
    program = jax.export.export(jax.jit(attend), platforms=["cuda"], disabled_checks=export_checks())(*shapes)
    assert [aval.shape for aval in jax.export.deserialize(program.serialize()).in_avals[3:]] == [(1, 1, ROWS)] * 2


# Refused calls


START, END = edges(1, 1, 1)
REFUSED: dict[str, tuple[Any, list[str]]] = {
    "unsigned": (KeyRanges(jnp.asarray(START, jnp.uint32), END), ["key_start.dtype: int32"]),
    "floating": (KeyRanges(START, jnp.asarray(END, jnp.float32)), ["key_end.dtype: int32"]),
    "no arrays": (KeyRanges(1, None), ["key_start: an int32 array", "key_end: an int32 array"]),
    "rows": (
        KeyRanges(START[..., 1:], END[..., 1:]),
        [f"key_start.shape: must be {(BATCH, HEADS, ROWS)}", f"key_end.shape: must be {(BATCH, HEADS, ROWS)}"],
    ),
    "two shapes": (KeyRanges(START.repeat(BATCH, 0), END), ["key_end.shape: that of key_start"]),
    "band": (KeyRanges(START, END, 3), ["band: a Mask"]),  # type: ignore[arg-type]
    "number of the band": (KeyRanges(START, END, Causal(0)), ["window_size: at least 1"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_when_traced(name: str) -> None:
    ranges, expected = REFUSED[name]
    expect_raised(lambda: ours(*OPERANDS, ranges), expected)


def test_a_traced_number_of_the_band_is_refused() -> None:
    with pytest.raises(NotSupported, match="window_size"):
        jax.jit(lambda size: ours(*OPERANDS, KeyRanges(START, END, Causal(size))))(3)


def test_split_rows_take_no_ranges() -> None:
    arrays = [OPERANDS[0], *(array[:, :ROWS] for array in OPERANDS[1:])]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    for strategy in ("all_gather", "ulysses", "ring"):
        options = {"context_axis": "x", "context_strategy": strategy, "mask": KeyRanges(START, END)}
        expect_raised(
            functools.partial(context_parallel_attention, *arrays, mesh=mesh, **options),
            ["key_start: None where the rows are split over devices"],
        )


def test_functions_with_masks_of_their_own() -> None:
    for function in (dot_product_attention, flax_attention):
        with pytest.raises(NotSupported, match=r"mask = .*KeyRanges.*: must be an array"):
            function(*OPERANDS, mask=RANGES)
