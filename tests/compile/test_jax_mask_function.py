"""Mask functions in JAX programs, beside attention in jax.numpy with a dense bias of -inf."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.problem.block_sparse import BlockSparse
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.mask_function import MaskFunction
from cutlass_py_attn.problem.mask_program import MaskProgram
from cutlass_py_attn.problem.masks import Causal, Full, Mask
from tests.support.refusals import expect_raised

jax = pytest.importorskip("jax", reason="jax is not installed")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # XLA compiles in half the time
jnp = jax.numpy

from cutlass_py_attn.jax import (  # noqa: E402
    attention,
    context_parallel_attention,
    export_checks,
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
    kernels,
    loss,
    operands,
    softmax_attention,
)

P, NamedSharding, AxisType = jax.sharding.PartitionSpec, jax.sharding.NamedSharding, jax.sharding.AxisType
ALL = (0, 1, 2)


OPERANDS = operands()
RANDOM = np.random.default_rng(7)


def ids_of(*leading: int, seed: int = 7) -> Any:
    """Documents of tokens, (..., BATCH, KEYS)."""
    return np.sort(np.random.default_rng(seed).integers(0, 3, (*leading, BATCH, KEYS)), axis=-1).astype(np.int32)


# Functions: what the package traces, and `dense_of` computes for all pairs


def documents(batch: Any, head: Any, query: Any, key: Any, ids: Any) -> Any:
    return ids[batch, query] == ids[batch, key]


def heads(batch: Any, head: Any, query: Any, key: Any, dilation: Any) -> Any:
    return (query - key) % dilation[head] == 0


def weights(batch: Any, head: Any, query: Any, key: Any, weight: Any, least: Any, marked: Any, step: Any) -> Any:
    """Of every kind of argument."""
    return ((weight[query, key] > 0.2) & marked[key]) | ((query - key) // step == least)


def plain(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query + key) % 3 != 1


def shared(batch: Any, head: Any, query: Any, key: Any, ids: Any) -> Any:
    return ids[query] <= ids[key]


def both(batch: Any, head: Any, query: Any, key: Any, ids: Any, dilation: Any) -> Any:
    return documents(batch, head, query, key, ids) | heads(batch, head, query, key, dilation)


IDS = ids_of()
DILATION = np.array([1, 2, 3, 5], np.int32)
RANGES = KeyRanges.windows([3, 6, 9, 4], 4, ROWS)
BLOCKS = BlockSparse(np.array([True, False, True, True]).reshape(4, 1, 1, 1), (64, 64))
MASKS = {
    "documents": MaskFunction(documents, {"ids": IDS}, Causal()),
    "heads": MaskFunction(heads, {"dilation": DILATION}),
    "weights": MaskFunction(
        weights,
        {"weight": RANDOM.random((ROWS, KEYS)), "least": -2, "marked": RANDOM.random(KEYS) < 0.7, "step": 3},
    ),
    "plain": MaskFunction(plain, {}, Causal(6)),
    "within ranges": MaskFunction(both, {"ids": IDS, "dilation": DILATION}, RANGES),
    "within blocks": MaskFunction(documents, {"ids": IDS}, BLOCKS),
}


def dense_of(mask: MaskFunction, function: Any) -> Any:
    """The mask as a bias of 0 and -inf; arrays may be traced. The indices of these functions are in range."""
    place = np.ogrid[:BATCH, :HEADS, :ROWS, :KEYS]
    names = mask.array_names
    arguments = {n: jnp.asarray(value) if n in names else value for n, value in mask.arguments.items()}
    seen = jnp.broadcast_to(function(*place, **arguments), (BATCH, HEADS, ROWS, KEYS))
    within = mask.within
    if isinstance(within, BlockSparse):
        seen = seen & jnp.asarray(within.visible_blocks)
        within = within.within
    if isinstance(within, KeyRanges):
        start, end = (jnp.asarray(edge)[..., None] for edge in (within.key_start, within.key_end))
        seen = seen & (start <= np.arange(KEYS)) & (np.arange(KEYS) < end)
        within = within.band
    return jnp.where(seen & within.materialise(ROWS, KEYS), 0.0, -jnp.inf)


FUNCTIONS = {
    **{"documents": documents, "heads": heads, "weights": weights, "plain": plain, "shared": shared},
    **{"within ranges": both, "within blocks": documents, "both": both},
}


def ours(query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    return attention(query, key, value, mask=mask, backend="reference", **options)


def theirs(function: Any) -> Callable[..., Any]:
    def attend(query: Any, key: Any, value: Any, mask: MaskFunction) -> Any:
        return softmax_attention(query, key, value, dense_of(mask, function))[0]

    return attend


# One call


@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", MASKS)
def test_output_logsumexp_and_gradients(name: str, is_jitted: bool) -> None:
    mask = MASKS[name]

    def run(attend: Callable[..., Any], *arrays: Any) -> Any:
        (output, logsumexp), pull = jax.vjp(attend, *arrays)
        grad_logsumexp = jnp.where(jnp.isfinite(logsumexp), jnp.cos(output).sum(-1).swapaxes(1, 2), 0)
        return output, logsumexp, pull((jnp.cos(output), grad_logsumexp))

    found = functools.partial(run, lambda *arrays: ours(*arrays, mask, return_logsumexp=True))
    bias = dense_of(mask, FUNCTIONS[name])
    wanted = functools.partial(run, lambda *arrays: softmax_attention(*arrays, bias))
    expect_close((jax.jit(found) if is_jitted else found)(*OPERANDS), jax.jit(wanted)(*OPERANDS))


# A pytree


def test_a_mask_is_a_pytree_of_its_arrays() -> None:
    mask = MASKS["weights"]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(mask)]
    assert paths == [".arguments['marked']", ".arguments['weight']"]
    leaves, tree = jax.tree.flatten(mask)
    again = jax.tree.unflatten(tree, leaves)
    assert (again.program, again.scalars, again.band) == (mask.program, (-2, 3), Full())
    assert list(again.arrays()) == ["mask_array_0", "mask_array_1"]
    assert again.arrays()["mask_array_1"] is mask.arguments["marked"]
    assert jax.tree.flatten(mask.with_arguments(least=np.int8(-2)))[1] == tree
    assert jax.tree.flatten(mask.with_arguments(step=4))[1] != tree
    of_axes = jax.tree.map(lambda _: 0, mask)  # as in_axes of jax.vmap
    assert jax.tree.structure(of_axes) == tree
    ranged = MASKS["within ranges"]
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(ranged)]
    assert names == [".arguments['dilation']", ".arguments['ids']", ".within.key_start", ".within.key_end"]
    shapes = jax.eval_shape(lambda mask: mask, ranged)
    assert isinstance(shapes, MaskFunction)
    assert shapes.arguments["ids"].shape == IDS.shape


def test_equal_functions_are_one_program() -> None:
    """Other values of arrays are no other program; another function, integer, shape or mask of numbers is one."""
    traced = []

    @jax.jit
    def attend(*arguments: Any) -> Any:
        traced.append(1)
        return ours(*arguments)

    def mask(ids: Any, function: Any = documents, within: Mask = Full(), **more: Any) -> MaskFunction:  # noqa: B008
        return MaskFunction(function, {"ids": ids, **more}, within)

    def near(batch: Any, head: Any, query: Any, key: Any, ids: Any, most: Any) -> Any:
        return documents(batch, head, query, key, ids) & (query - key < most)

    def copy(batch: Any, head: Any, query: Any, key: Any, ids: Any) -> Any:
        return ids[batch, query] == ids[batch, key]

    calls = [
        (mask(IDS), documents, 1),
        (mask(ids_of(seed=8)), documents, 1),
        (mask(jnp.asarray(ids_of(seed=9)), copy), documents, 1),
        (mask(IDS[:, ::-1].astype(np.int64)), documents, 1),
        (mask(IDS[0], shared), shared, 2),
        (mask(IDS, near, most=3), near, 3),
        (mask(IDS, near, most=4), near, 4),
        (mask(IDS, within=Causal()), documents, 5),
    ]
    for own, function, size in calls:
        expect_close(attend(*OPERANDS, own), theirs(function)(*OPERANDS, own))
        assert len(traced) == size


def test_two_calls_that_differ_in_their_masks() -> None:
    """In one program, forward and backward, eager and jitted."""
    first = MASKS["documents"]
    others = {
        "documents": first.with_arguments(ids=ids_of(seed=10)),
        "heads": MASKS["heads"],
        "weights": MASKS["weights"].with_arguments(step=2),
        "within ranges": MASKS["within ranges"],
    }

    def both_calls(attend: Any, second: Any, other: MaskFunction, *arrays: Any) -> Any:
        return loss(attend, *arrays, first) + 2 * loss(second, *arrays, other)

    for name, other in others.items():
        found = jax.value_and_grad(functools.partial(both_calls, ours, ours, other), ALL)
        wanted = functools.partial(both_calls, theirs(documents), theirs(FUNCTIONS[name]), other)
        expected = jax.jit(jax.value_and_grad(wanted, ALL))(*OPERANDS)
        expect_close(found(*OPERANDS), expected)
        expect_close(jax.jit(found)(*OPERANDS), expected)


def test_a_mask_that_a_program_makes() -> None:
    """The function is traced once for each trace of the program, with arrays that the program computes."""
    traced = []

    def counted(*coordinates: Any, **arrays: Any) -> Any:
        traced.append(1)
        return documents(*coordinates, **arrays)

    @jax.jit
    def step(lengths: Any) -> Any:
        ends = jnp.cumsum(lengths, axis=1)
        ids = jax.vmap(lambda own: jnp.searchsorted(own, jnp.arange(KEYS), side="right"))(ends).astype(jnp.int32)
        mask = MaskFunction(counted, {"ids": ids})
        return jax.value_and_grad(functools.partial(loss, ours), ALL)(*OPERANDS, mask), ids

    for seed in (1, 2):
        lengths = np.random.default_rng(seed).integers(0, 6, (BATCH, 3))
        found, ids = step(lengths)
        mask = MaskFunction(documents, {"ids": np.asarray(ids)})
        expect_close(found, jax.value_and_grad(functools.partial(loss, theirs(documents)), ALL)(*OPERANDS, mask))
    assert traced == [1]


def test_a_traced_number_is_an_array_without_axes() -> None:
    """Other values of it are no other program, and vmap maps it."""
    traced = []

    def near(batch: Any, head: Any, query: Any, key: Any, width: Any) -> Any:
        return (query - key < width) & (query >= key)

    def attend(width: Any) -> Any:
        traced.append(1)
        return ours(*OPERANDS, MaskFunction(near, {"width": width}))

    wanted = [ours(*OPERANDS, Causal(width)) for width in (2, 5)]
    once = jax.jit(attend)
    expect_close([once(width) for width in (2, 5)], wanted)
    assert len(traced) == 1
    expect_close(jax.vmap(attend)(jnp.array([2, 5], jnp.int32)), jnp.stack(wanted))


# Transformations

DIFFER = {"arrays": (None, 0), "query": (0, None), "both": (0, 0)}


@pytest.mark.parametrize("name", ["documents", "heads", "shared", "both", "plain"])
@pytest.mark.parametrize("what", DIFFER)
def test_vmap(what: str, name: str) -> None:
    """Element i is the result of element i, forward and backward; the mapped axis joins the batch in one call."""
    query_axis, array_axis = DIFFER[what]
    query = draw(11, 3, *OPERANDS[0].shape) if query_axis == 0 else OPERANDS[0]
    leading = () if array_axis is None else (3,)
    values = {
        "ids": ids_of(*leading)[..., 0, :] if name == "shared" else ids_of(*leading),
        "dilation": np.random.default_rng(3).integers(1, 5, (*leading, HEADS)).astype(np.int32),
    }
    function = FUNCTIONS[name]
    ones = {"documents": ("ids",), "shared": ("ids",), "heads": ("dilation",), "plain": (), "both": ("ids", "dilation")}
    kinds = {own: (values[own][0] if leading else values[own]) for own in ones[name]}
    template = MaskFunction(function, kinds, Causal())

    def element(attend: Callable[..., Any], query: Any, arrays: dict[str, Any]) -> Any:
        mask = template.with_arguments(**arrays)
        return jax.value_and_grad(functools.partial(loss, attend), ALL)(query, *OPERANDS[1:], mask)

    arrays = {own: jnp.asarray(values[own]) for own in ones[name]}
    in_axes = query_axis, array_axis
    if query_axis is None and not arrays:
        return
    mapped = jax.vmap(functools.partial(element, ours), in_axes)
    wanted = jax.jit(jax.vmap(functools.partial(element, theirs(function)), in_axes))(query, arrays)
    assert calls_in(mapped, query, arrays) == 2
    expect_close(mapped(query, arrays), wanted)
    expect_close(jax.jit(mapped)(query, arrays), wanted)


def test_vmap_of_one_of_two_arrays_by_a_tree_of_axes() -> None:
    mask = MASKS["within ranges"]
    dilation = np.stack([DILATION, DILATION[::-1], DILATION + 1])

    def element(attend: Callable[..., Any], dilation: Any) -> Any:
        return jax.grad(functools.partial(loss, attend))(*OPERANDS, mask.with_arguments(dilation=dilation))

    expect_close(*(jax.jit(jax.vmap(functools.partial(element, attend)))(dilation) for attend in (ours, theirs(both))))
    stacked = jax.tree.map(lambda array: jnp.stack([array, array[::-1]], axis=1), MASKS["documents"])
    in_axes = (None, None, None, jax.tree.map(lambda _: 1, stacked))
    found, wanted = (jax.vmap(attend, in_axes)(*OPERANDS, stacked) for attend in (ours, theirs(documents)))
    expect_close(found, wanted)


@pytest.mark.parametrize("name", ["within ranges", "within blocks"])
def test_vmap_of_a_mask_with_all_that_is_within(name: str) -> None:
    mask = jax.tree.map(lambda array: jnp.stack([array, array[::-1], array]), MASKS[name])
    in_axes = (None, None, None, 0)
    found, wanted = (jax.jit(jax.vmap(attend, in_axes)) for attend in (ours, theirs(FUNCTIONS[name])))
    assert calls_in(jax.vmap(ours, in_axes), *OPERANDS, mask) == 1
    expect_close(found(*OPERANDS, mask), wanted(*OPERANDS, mask))


def test_vmap_of_vmap() -> None:
    """Each axis joins the batch: one call, of a function with two more divisions."""
    query, ids, dilation = draw(12, 3, 2, *OPERANDS[0].shape), ids_of(3), np.stack([DILATION, DILATION + 2])
    template = MaskFunction(both, {"ids": IDS, "dilation": DILATION})

    def element(attend: Callable[..., Any], query: Any, ids: Any, dilation: Any) -> Any:
        mask = template.with_arguments(ids=ids, dilation=dilation)
        return jax.grad(functools.partial(loss, attend), ALL)(query, *OPERANDS[1:], mask)

    def twice(attend: Callable[..., Any]) -> Any:
        inner = jax.vmap(functools.partial(element, attend), (0, None, 0))
        return jax.vmap(inner, (0, 0, None))

    assert calls_in(twice(ours), query, ids, dilation) == 2
    found, wanted = (jax.jit(twice(attend))(query, ids, dilation) for attend in (ours, theirs(both)))
    expect_close(found, wanted)


def test_vmap_of_batches_of_one() -> None:
    """The mapped axis is the batch; no division is needed."""
    arrays, ids = operands(3, batch=1), ids_of()[:3, None]

    def element(query: Any, key: Any, value: Any, ids: Any) -> Any:
        return ours(query, key, value, MaskFunction(documents, {"ids": ids}))

    found = jax.vmap(element)(*arrays, ids)
    for number in range(3):
        seen = ids[number, 0, :ROWS, None] == ids[number, 0]
        own = (array[number] for array in arrays)
        expect_close(found[number], softmax_attention(*own, jnp.where(seen, 0.0, -jnp.inf))[0])


@pytest.mark.parametrize("kind", ["axes", "integers"])
def test_elements_that_cannot_join_run_one_after_another(kind: str) -> None:
    def of_axes(batch: Any, head: Any, query: Any, key: Any, seen: Any) -> Any:
        return seen[batch, head, query, key]

    def of_integers(batch: Any, head: Any, query: Any, key: Any, ids: Any, **numbers: Any) -> Any:
        return (ids[batch, query] == ids[batch, key]) | (query * numbers["a"] + numbers["b"] > key * numbers["c"])

    random = np.random.default_rng(4)
    seen = random.random((3, BATCH, HEADS, ROWS, KEYS)) < 0.5
    integers = {"a": 1, "b": -9, "c": 1, "d": 0}
    function, name, arrays, more = {
        "axes": (of_axes, "seen", seen, {}),
        "integers": (of_integers, "ids", ids_of(3), integers),
    }[kind]
    template = MaskFunction(function, {name: arrays[0], **more})

    def element(attend: Callable[..., Any], array: Any) -> Any:
        return jax.grad(functools.partial(loss, attend), ALL)(*OPERANDS, template.with_arguments(**{name: array}))

    found, wanted = (
        jax.jit(jax.vmap(functools.partial(element, attend)))(arrays) for attend in (ours, theirs(function))
    )
    expect_close(found, wanted)


@pytest.mark.parametrize("remat", ["plain", "remat", "policy"])
def test_layers_of_a_scan_with_one_mask(remat: str) -> None:
    """The mask is among what the scan carries; one has floating-point arrays."""
    policy = jax.checkpoint_policies.save_only_these_names("cutlass_py_attn") if remat == "policy" else None
    attend = ours if remat == "plain" else jax.checkpoint(ours, policy=policy)
    arguments = draw(30, 3, HEADS * DIM, HEADS * DIM) / 6, draw(31, BATCH, ROWS, HEADS * DIM)

    def layers(attend: Callable[..., Any], weights: Any, given: Any, mask: MaskFunction) -> Any:
        def layer(carry: tuple[Any, MaskFunction], weight: Any) -> tuple[tuple[Any, MaskFunction], None]:
            rows, mask = carry
            query = (rows @ weight).reshape(BATCH, ROWS, HEADS, DIM)
            return (rows + attend(query, *OPERANDS[1:], mask).reshape(rows.shape), mask), None

        (rows, _), _ = jax.lax.scan(layer, (given, mask), weights)
        return jnp.sum(jnp.sin(rows))

    for name in ("weights", "within ranges"):
        mask = jax.tree.map(jnp.asarray, MASKS[name])
        found, wanted = (
            jax.jit(jax.value_and_grad(functools.partial(layers, each), (0, 1)))(*arguments, mask)
            for each in (attend, theirs(FUNCTIONS[name]))
        )
        expect_close(found, wanted)


def test_arrays_have_no_gradients() -> None:
    """Those of integers and bools are float0, and those of floating-point numbers zeros."""
    mask = jax.tree.map(jnp.asarray, MASKS["weights"])
    found = jax.jit(jax.grad(functools.partial(loss, ours), (0, 3), allow_int=True))(*OPERANDS, mask)
    assert isinstance(found[1], MaskFunction)
    assert found[1].arguments["marked"].dtype == jax.dtypes.float0
    assert found[1].arguments["weight"].shape == (ROWS, KEYS)
    assert not found[1].arguments["weight"].any()
    expect_close(found[0], jax.grad(functools.partial(loss, theirs(weights)))(*OPERANDS, mask))
    output, pull = jax.vjp(ours, *OPERANDS, mask)
    assert not pull(output)[3].arguments["weight"].any()
    tangents = jax.tree.map(
        lambda array: jnp.ones_like(array) if array.dtype == jnp.float32 else np.zeros(array.shape, jax.dtypes.float0),
        mask,
    )
    moved = jax.jvp(ours, (*OPERANDS, mask), (*OPERANDS, tangents))[1]
    expect_close(moved, jax.jvp(lambda *arrays: ours(*arrays, mask), OPERANDS, OPERANDS)[1])


@pytest.mark.parametrize("name", MASKS)
def test_forward_mode_and_second_derivatives(name: str) -> None:
    mask = MASKS[name]
    directions = tuple(jnp.cos(3 * array) for array in OPERANDS)

    def derivatives(attend: Callable[..., Any], arrays: Arrays, mask: MaskFunction) -> Any:
        def total(*arrays: Any) -> Any:
            return loss(attend, *arrays, mask)

        tangents = jax.jvp(lambda *arrays: attend(*arrays, mask), arrays, directions)
        of_gradient = jax.jvp(jax.grad(total, ALL), arrays, directions)

        def along(*arrays: Any) -> Any:
            pairs = zip(jax.grad(total, ALL)(*arrays), directions, strict=True)
            return sum((gradient * direction).sum() for gradient, direction in pairs)

        return tangents, of_gradient, jax.grad(along, ALL)(*arrays)

    found, wanted = (
        jax.jit(functools.partial(derivatives, attend))(OPERANDS, mask) for attend in (ours, theirs(FUNCTIONS[name]))
    )
    expect_close(found, wanted, 1e-4)


def test_tangents_of_mapped_arrays() -> None:
    template = MASKS["documents"]

    def tangent(attend: Callable[..., Any], ids: Any) -> Any:
        mask = template.with_arguments(ids=ids)
        return jax.jvp(lambda *arrays: attend(*arrays, mask), OPERANDS, OPERANDS)

    found, wanted = (
        jax.jit(jax.vmap(functools.partial(tangent, attend)))(ids_of(3)) for attend in (ours, theirs(documents))
    )
    expect_close(found, wanted, 1e-4)


def test_custom_vjp_around_a_call() -> None:
    mask = MASKS["within ranges"]

    @jax.custom_vjp
    def attend(query: Any, mask: MaskFunction) -> Any:
        return ours(query, *OPERANDS[1:], mask)

    def forward(query: Any, mask: MaskFunction) -> Any:
        return jax.vjp(lambda query: ours(query, *OPERANDS[1:], mask), query)

    attend.defvjp(forward, lambda pull, cotangent: (2 * pull(cotangent)[0], None))
    found = jax.jit(jax.grad(lambda query: loss(attend, query, mask)))(OPERANDS[0])
    expect_close(found, 2 * jax.grad(functools.partial(loss, theirs(both)))(*OPERANDS, mask))


# Several devices


def put(array: Any, mesh: Any, *axes: Any) -> Any:
    return jax.device_put(array, NamedSharding(mesh, P(*axes[: array.ndim])))


def mesh_of(sizes: tuple[int, ...], kind: str) -> Any:
    return jax.make_mesh(sizes, ("x", "y")[: len(sizes)], axis_types=(getattr(AxisType, kind),) * len(sizes))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", ["documents", "heads", "within ranges", "plain"])
@pytest.mark.parametrize("how", SPLITS)
def test_calls_that_a_mesh_splits(how: str, name: str, kind: str, stand_in: None) -> None:
    """Each device has whole arrays, and counts batches and heads from where its own begin."""
    spec, sizes = SPLITS[how]
    mesh, mask = mesh_of(sizes, kind), MASKS[name]
    batch_axis, _, heads_axis = (*spec, None, None)[:3]
    heads_key_axis = None if how == "more than key heads" else heads_axis
    arrays = operands(dtype=np.float16)
    gradients = jax.value_and_grad(functools.partial(loss, by_kernels), ALL)
    wide = (array.astype(np.float32) for array in arrays)
    expected = jax.value_and_grad(functools.partial(loss, theirs(FUNCTIONS[name])), ALL)(*wide, mask)
    for axis in (batch_axis, None):  # of the first axis of the arrays
        placed = [
            put(arrays[0], mesh, batch_axis, None, heads_axis),
            *(put(array, mesh, batch_axis, None, heads_key_axis) for array in arrays[1:]),
            jax.tree.map(lambda array: put(array, mesh, axis if array.shape[0] == BATCH else None), mask),  # noqa: B023
        ]
        with jax.set_mesh(mesh):
            program = jax.jit(gradients).lower(*placed).compile()
            xla_reference.computed.clear()
            found = jax.block_until_ready(program(*placed))
        expect_close(found, expected, 1e-2)
        problems = xla_reference.computed
        parts = mesh.shape.get(batch_axis, 1), mesh.shape.get(heads_axis, 1)
        assert {(p.shape.batch, p.shape.num_heads) for p in problems} == {(BATCH // parts[0], HEADS // parts[1])}
        whole = mask.program
        is_moved = any(
            coordinate in whole.coordinates and count > 1
            for coordinate, count in zip(("batch", "head"), parts, strict=True)
        )
        (program_text,) = {p.mask_program for p in problems}
        assert len(MaskProgram.parse(program_text or "").arrays) == len(whole.arrays) + is_moved


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_mapped_arrays_without_axes_on_a_mesh(kind: str, stand_in: None) -> None:
    """A program of a joined batch, of which each device has a part."""
    mesh = mesh_of((2, 2), kind)
    arrays, widths = operands(dtype=np.float16), jnp.array([2, 5], jnp.int32)

    def near(batch: Any, head: Any, query: Any, key: Any, width: Any) -> Any:
        return (query - key < width[()] + batch) & (query >= key - head)

    def element(attend: Callable[..., Any], *given: Any) -> Any:
        return attend(*given[1:], MaskFunction(near, {"width": given[0]}))

    wide = (array.astype(np.float32) for array in arrays)
    expected = jax.vmap(functools.partial(element, theirs(near)), (0, None, None, None))(widths, *wide)
    with jax.set_mesh(mesh):
        placed = [put(array, mesh, "x", None, "y") for array in arrays]
        mapped = jax.jit(jax.vmap(functools.partial(element, by_kernels), (0, None, None, None)))
        expect_close(mapped(widths, *placed), expected, 1e-2)
        single = jax.jit(functools.partial(element, by_kernels))(widths[0], *placed)
        expect_close(single, expected[0], 1e-2)
    assert {problem.shape.num_heads for problem in xla_reference.computed} == {2}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_tangents_on_a_mesh(kind: str) -> None:
    mesh, mask = mesh_of((2, 2), kind), MASKS["within ranges"]

    def tangent(attend: Callable[..., Any], mask: MaskFunction, *arrays: Any) -> Any:
        return jax.jvp(lambda *each: attend(*each, mask), arrays, arrays)

    expected = tangent(theirs(both), mask, *OPERANDS)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda array: put(array, mesh, "x" if array.shape[0] == BATCH else None), mask)
        arrays = [put(array, mesh, "x", None, "y") for array in OPERANDS]
        expect_close(jax.jit(functools.partial(tangent, ours))(placed, *arrays), expected, 1e-4)


@pytest.mark.parametrize("axes", [("x",), (None, "x")], ids=["mapped axis", "batch"])
def test_vmap_on_an_explicit_mesh(axes: tuple[Any, ...], stand_in: None) -> None:
    mesh = mesh_of((2,), "Explicit")
    arrays, ids = operands(2, dtype=np.float16), ids_of(2)

    def element(query: Any, key: Any, value: Any, ids: Any) -> Any:
        mask = MaskFunction(documents, {"ids": ids})
        return jax.grad(functools.partial(loss, by_kernels), ALL)(query, key, value, mask)

    expected = jax.jit(jax.vmap(element))(*arrays, ids)
    with jax.set_mesh(mesh):
        placed = [put(array, mesh, *axes) for array in (*arrays, ids)]
        expect_close(jax.jit(jax.vmap(element))(*placed), expected, 1e-2)


def test_a_mask_inside_shard_map(stand_in: None) -> None:
    """A device counts its own batches."""
    mesh, mask = mesh_of((2,), "Auto"), MASKS["documents"]
    arrays = operands(dtype=np.float16)
    split = jax.shard_map(by_kernels, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, attend), ALL))(*arrays, mask) for attend in (split, by_kernels)
    )
    expect_close(found, expected, 1e-2)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_four_arrays_leave_none_for_a_part(kind: str, stand_in: None) -> None:
    def of_four(batch: Any, head: Any, query: Any, key: Any, **arrays: Any) -> Any:
        return sum((array[batch] for array in arrays.values()), start=key) >= query

    mesh = mesh_of((2,), kind)
    mask = MaskFunction(of_four, {name: np.arange(BATCH, dtype=np.int32) for name in "abcd"})
    with jax.set_mesh(mesh):
        placed = [put(array, mesh, "x") for array in operands(dtype=np.float16)]
        with pytest.raises(Exception, match=r"reads 4 arrays and the position of batch, split over x"):
            jax.jit(by_kernels).lower(*placed, mask).compile()


def test_dropout_over_heads_takes_no_function_of_batches(stand_in: None) -> None:
    """A device then computes each batch in a call of its own."""
    mesh = mesh_of((2,), "Explicit")
    options = {"dropout_p": 0.5, "dropout_key": jax.random.key(0), "kernels": kernels, "arch": "sm_90"}
    with jax.set_mesh(mesh):
        placed = [put(array, mesh, None, None, "x") for array in operands(dtype=np.float16)]
        with pytest.raises(Exception, match="heads are split over x with dropout, and the mask function reads batch"):
            jax.eval_shape(lambda *arrays: attention(*arrays, mask=MASKS["documents"], **options), *placed)


def test_an_exported_program_takes_other_arrays() -> None:
    def attend(query: Any, key: Any, value: Any, ids: Any) -> Any:
        return by_kernels(query, key, value, MaskFunction(documents, {"ids": ids}, Causal()))

    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (*operands(dtype=jnp.bfloat16), IDS)]
    program = jax.export.export(jax.jit(attend), platforms=["cuda"], disabled_checks=export_checks())(*shapes)
    assert jax.export.deserialize(program.serialize()).in_avals[3].shape == IDS.shape


# Refused calls


def test_refused_when_traced() -> None:
    with_wide = functools.partial(MaskFunction, documents, {"ids": jnp.asarray(IDS, jnp.uint32)})
    expect_raised(with_wide, ["arguments['ids'].dtype: bool, uint8, int32 or float32"])

    def branches(batch: Any, head: Any, query: Any, key: Any, ids: Any) -> Any:
        return query >= key if ids[batch, key] else key == 0

    with pytest.raises(Exception, match=r"test_jax_mask_function.py, line \d+: if, and, or"):
        jax.jit(lambda ids: ours(*OPERANDS, MaskFunction(branches, {"ids": ids})))(IDS)


def test_split_rows_take_no_functions() -> None:
    arrays = [OPERANDS[0], *(array[:, :ROWS] for array in OPERANDS[1:])]
    for strategy in ("all_gather", "ulysses", "ring"):
        options = {"context_axis": "x", "context_strategy": strategy, "mask": MASKS["plain"]}
        expect_raised(
            functools.partial(context_parallel_attention, *arrays, mesh=mesh_of((2,), "Auto"), **options),
            ["mask_program: None where the rows are split over devices"],
        )
