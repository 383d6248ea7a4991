"""Random JAX programs of attention calls: what a program is, how it is drawn, and its results by any attention.

A program is one to four calls, self or cross, whose operands are trained, frozen or stopped. Each call is plain or
inside jit, remat with a policy, scan, vmap along odd axes or a split of its rows over devices. The whole is
differentiated in one of several ways, inside jit or not, on a mesh or not. Half of the programs repeat a call with
other operands: equal shapes and options are what caches may confuse.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import cutlass_py_attn.jax as library
from cutlass_py_attn.api.options import VariableLength
from cutlass_py_attn.problem.key_ranges import KeyRanges
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window
from cutlass_py_attn.score_terms.dropout import Dropout, dropout_mask, keep_scale

Arrays = dict[str, Any]

BATCH, ROWS, SHORT, HEADS, HEADS_KEY, HEAD_DIM = 2, 8, 4, 4, 2, 8
EXAMPLES: Final = 2
DROPOUT_P: Final = 0.5
SHAPES: Final = {
    "query": (BATCH, ROWS, HEADS, HEAD_DIM),
    "key": (BATCH, ROWS, HEADS_KEY, HEAD_DIM),
    "value": (BATCH, ROWS, HEADS_KEY, HEAD_DIM),
    "bias": (1, HEADS, ROWS, ROWS),
    "sinks": (HEADS,),
}
OPERANDS: Final = ("query", "key", "value", "bias", "sinks")
MASKS: Final[dict[str, Mask]] = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(2, 1),
    "bottom_right": CausalBottomRight(),
}
RANGES: Final = {"all": (1, 1), "batch": (BATCH, 1), "heads": (1, HEADS), "both": (BATCH, HEADS)}
WRAPS: Final = ("plain", "jit", "remat", "remat_names", "remat_dots", "scan", "vmap")
STRATEGIES: Final = ("all_gather", "ulysses", "ring")
REVERSE: Final = ("grad", "value_and_grad", "vjp_reuse", "vmap_grad", "grad_vmap")
FORWARD: Final = ("jvp", "linearize", "jvp_of_grad", "grad_of_jvp")
MESHES: Final = ("auto", "explicit", "shard_map")
AXIS: Final = "devices"


@dataclass(frozen=True, slots=True)
class Layer:
    """One call.

    query, key, value: "query", "key" and "value" for leaves, "x" for what the layer before returned, or "frozen"
    stopped: operands behind jax.lax.stop_gradient
    is_short: whether there are SHORT keys; with mask "bottom_right" the first rows then see none
    bias, sinks: "none", "trained" or "frozen"
    dropout: "none", "shared" for one key of all elements, or "split" for a key of each
    logsumexp: "none", "unused" or "used" in the loss
    wrap: one of WRAPS, "packed" for sequences in one row, or a strategy of STRATEGIES
    mapped, axes: of vmap, the operands with an axis, and that axis of query, key, value and result
    ranges: "none", or one of RANGES for ranges of keys in these axes, whose band is the mask
    """

    query: str = "x"
    key: str = "key"
    value: str = "value"
    stopped: tuple[str, ...] = ()
    is_short: bool = False
    mask: str = "full"
    softcap: float = 0.0
    bias: str = "none"
    sinks: str = "none"
    has_alibi: bool = False
    dropout: str = "none"
    logsumexp: str = "none"
    wrap: str = "plain"
    mapped: tuple[str, ...] = ()
    axes: tuple[int, ...] = (0, 0, 0, 0)
    ranges: str = "none"


@dataclass(frozen=True, slots=True)
class Program:
    """A program.

    trained: leaves that are differentiated
    mode: one of REVERSE and FORWARD
    examples: (leaf, axis) of vmap in the modes vmap_grad and grad_vmap
    mesh: "none", or one of MESHES
    """

    layers: tuple[Layer, ...]
    trained: tuple[str, ...]
    mode: str = "grad"
    is_jitted: bool = False
    dtype: str = "float32"
    examples: tuple[tuple[str, int], ...] = ()
    mesh: str = "none"


Attention = Callable[[Layer, Arrays, Any], tuple[Any, Any]]


def draw(seed: int, modes: tuple[str, ...], devices: int, kernel_sets: int = 0) -> Program:
    """Returns the program of a seed.

    devices: at hand, for programs with a mesh
    kernel_sets: sets of features that all programs share, so that they need few kernels; 0 for any features
    """
    choose = random.Random(seed)
    features = random.Random(seed % kernel_sets) if kernel_sets else choose
    mesh = choose.choice(MESHES) if devices > 1 and choose.random() < 0.15 else "none"
    mode = choose.choice(modes)
    # Examples may be split over devices; JAX cannot batch every program on an Explicit mesh then.
    mesh = "auto" if mesh != "none" and mode in ("vmap_grad", "grad_vmap") else mesh
    is_plain = mesh != "none" or mode in FORWARD
    layers = [_layer(choose, features, True, is_plain, devices)]
    for _ in range(choose.randrange(4)):
        features = random.Random(seed % kernel_sets) if kernel_sets else choose
        layer = _layer(choose, features, False, is_plain, devices)
        if choose.random() < 0.5:
            first = layers[0]
            has_both = first.bias != "none" and layer.bias != "none"
            layer = replace(
                first,
                query="x",
                key=layer.key,
                value=layer.value,
                stopped=layer.stopped,
                bias=layer.bias if has_both else first.bias,
            )
        layers.append(layer)
    trained = tuple(name for name in SHAPES if choose.random() < 0.65) or ("query",)
    mapped = [name for name in trained if choose.random() < 0.6] or [trained[0]]
    examples = tuple((name, choose.randrange(len(SHAPES[name]) + 1)) for name in mapped)
    dtype = "bfloat16" if mode in REVERSE and choose.random() < 0.15 else "float32"
    # A host callback's results are on one device; outside of jit JAX combines them with no array of several.
    has_devices = mesh != "none" or any(layer.wrap in STRATEGIES for layer in layers)
    return Program(tuple(layers), trained, mode, choose.random() < 0.7 or has_devices, dtype, examples, mesh)


def _layer(choose: random.Random, features: random.Random, is_first: bool, is_plain: bool, devices: int) -> Layer:
    """Draws a call.

    features: draws what decides the kernels
    is_plain: whether the call has neither packed sequences nor split rows, which forward mode refuses
    """
    wrap = choose.choice(WRAPS)
    if not is_plain and choose.random() < 0.2:
        wrap = choose.choice(("packed", *(STRATEGIES if devices > 1 else ())))
    is_alone = wrap in ("packed", *STRATEGIES)
    is_short = not is_alone and choose.random() < 0.2
    sources = ("key", "key", "x", "frozen")
    return Layer(
        query="query" if is_first or choose.random() < 0.15 else "x",
        key=choose.choice(sources),
        value=choose.choice(("value", "value", "x", "frozen")),
        stopped=tuple(name for name in OPERANDS[:3] if choose.random() < 0.1),
        is_short=is_short,
        mask=features.choice(("full", "causal", "causal", "window", "bottom_right")) if wrap != "ring" else "causal",
        softcap=features.choice((0.0, 0.0, 3.0)),
        bias=features.choice(("none", "none", "trained", "frozen")) if wrap != "packed" else "none",
        sinks=features.choice(("none", "none", "trained", "frozen")),
        has_alibi=features.random() < 0.15 and wrap not in ("all_gather", "ring"),  # refused with most masks
        dropout=features.choice(("none", "none", "none", "shared", "split")) if not is_alone else "none",
        logsumexp=choose.choice(("none", "unused", "used")),
        wrap=wrap,
        mapped=tuple(name for name in OPERANDS if choose.random() < 0.5) or ("query",),
        axes=tuple(choose.randrange(5) for _ in range(4)),
    )


def with_ranges(program: Program, seed: int, *, of_kernels: bool) -> Program:
    """Returns the program with ranges of keys in most of its calls.

    of_kernels: leave out what kernels with ranges do not take
    """
    choose = random.Random(f"ranges {seed}")
    layers = []
    for layer in program.layers:
        if layer.wrap not in ("packed", *STRATEGIES) and choose.random() < 0.8:
            mapped = layer.mapped if choose.random() < 0.5 else choose.choice(((*layer.mapped, "ranges"), ("ranges",)))
            layer = replace(layer, ranges=choose.choice([*RANGES]), mapped=mapped)
            if of_kernels:
                layer = replace(layer, softcap=0.0, bias="none", has_alibi=False, dropout="none")
        layers.append(layer)
    return replace(program, layers=tuple(layers), dtype="bfloat16" if of_kernels else program.dtype)


# Attention


def ours(backend: str, **of_calls: Any) -> Attention:
    """Returns attention of the package. of_calls: more options of every call."""

    def attend(layer: Layer, operands: Arrays, key: Any) -> tuple[Any, Any]:
        terms = {name: operands[name] for name in ("bias", "sinks") if operands[name] is not None}
        mask, ranges = MASKS[layer.mask], operands.get("ranges")
        mask_or_ranges = mask if ranges is None else KeyRanges(ranges[0], ranges[1], mask)
        options: dict[str, Any] = {"mask": mask_or_ranges, "softcap": layer.softcap, "backend": backend, **terms}
        options |= of_calls
        options |= {"alibi_slopes": SLOPES} if layer.has_alibi else {}
        options |= {"dropout_p": DROPOUT_P, "dropout_key": key} if layer.dropout != "none" else {}
        options |= {"return_logsumexp": True} if layer.logsumexp != "none" else {}
        arrays = [operands[name] for name in OPERANDS[:3]]
        if layer.wrap in STRATEGIES:
            mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
            run: Any = functools.partial(
                library.context_parallel_attention, context_axis="rows", context_strategy=layer.wrap, mesh=mesh
            )
        else:
            run = library.attention
        if layer.wrap == "packed":
            starts = jnp.arange(0, BATCH * ROWS + 1, ROWS, dtype=jnp.int32)
            options["sequences"] = VariableLength(starts, starts, ROWS, ROWS)
            shape = arrays[0].shape
            arrays = [array.reshape(1, -1, *array.shape[2:]) for array in arrays]
            results = run(*arrays, **options)
            output, lse = results if layer.logsumexp != "none" else (results, None)
            return output.reshape(*shape[:3], -1), lse
        results = run(*arrays, **options)
        output, lse = results if layer.logsumexp != "none" else (results, None)
        return output, lse

    return attend


def plain(layer: Layer, operands: Arrays, key: Any) -> tuple[Any, Any]:
    """Computes attention in jax.numpy. A row that sees no key has output 0 and logsumexp -inf."""
    query, keys, values = (operands[name].astype(jnp.float32) for name in OPERANDS[:3])
    bias, sinks = operands["bias"], operands["sinks"]
    batch, rows, heads, _ = query.shape
    count = keys.shape[1]
    keys, values = (jnp.repeat(array, heads // array.shape[2], axis=2) for array in (keys, values))
    scores = jnp.einsum("bmhd,bnhd->bhmn", query, keys, precision="highest") / np.sqrt(query.shape[3])
    if layer.softcap:
        scores = layer.softcap * jnp.tanh(scores / layer.softcap)
    if bias is not None:
        scores = scores + bias
    row, column = np.arange(rows)[:, None], np.arange(count)[None]
    if layer.has_alibi:
        scores = scores - SLOPES[:, None, None] * np.abs(row + count - rows - column).astype(np.float32)
    distance = column - row
    is_seen = {
        "full": distance == distance,
        "causal": distance <= 0,
        "window": (distance <= 1 + count - rows) & (distance >= count - rows - 2),
        "bottom_right": distance <= count - rows,
    }[layer.mask]
    if operands.get("ranges") is not None:
        start, end = (edge[..., None] for edge in operands["ranges"])
        is_seen = is_seen & (start <= column) & (column < end)
    scores = jnp.where(is_seen, scores, -1e30)
    joined = scores
    if sinks is not None:
        joined = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (batch, heads, rows, 1))], -1)
    has_keys = is_seen.any(-1) | (sinks is not None)
    lse = jax.nn.logsumexp(joined, -1)
    weights = jnp.where(is_seen, jnp.exp(scores - lse[..., None]), 0.0)
    if layer.dropout != "none":
        words = jnp.concatenate([jax.random.bits(key, (2,), "uint32"), jnp.zeros(2, "uint32")])
        weights = weights * _keep(words, (batch, heads, rows, count)) * np.float32(keep_scale(DROPOUT_P))
    output = jnp.einsum("bhmn,bnhd->bmhd", weights, values, precision="highest")
    return output.astype(operands["query"].dtype), jnp.where(has_keys, lse, -jnp.inf)


def _keep(words: Any, shape: tuple[int, ...]) -> Any:
    def on_host(words: Any) -> Any:
        seed, offset = (int(number) for number in np.asarray(words).view(np.uint64))
        return dropout_mask(Dropout(DROPOUT_P, seed, offset), *shape).astype(np.float32)

    return jax.pure_callback(on_host, jax.ShapeDtypeStruct(shape, jnp.float32), words, vmap_method="sequential")


# Programs


def _leaf(name: str, shape: tuple[int, ...]) -> Any:
    return jnp.asarray(np.random.default_rng(sum(map(ord, name))).standard_normal(shape).astype(np.float32))


SLOPES: Final = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
VALUES: Final = {name: _leaf(name, shape) for name, shape in SHAPES.items()}
FROZEN: Final = {name: _leaf(f"frozen {name}", shape) for name, shape in SHAPES.items()}
WEIGHT: Final = _leaf("weight", SHAPES["query"])
KEY: Final = jax.random.key(7)


def _edges(axes: tuple[int, int], number: int) -> tuple[Any, Any]:
    """Returns starts and ends of ranges of keys, of which some are empty, and some reach past the keys."""
    random_number = np.random.default_rng(number)
    start = random_number.integers(-2, ROWS, (*axes, ROWS))
    return jnp.asarray(start, jnp.int32), jnp.asarray(start + random_number.integers(-1, ROWS, start.shape), jnp.int32)


def leaves_of(program: Program) -> Arrays:
    """Returns the trained leaves; in modes with examples some have an axis of EXAMPLES."""
    leaves = {name: VALUES[name] for name in program.trained}
    if program.mode in ("vmap_grad", "grad_vmap"):
        for name, axis in program.examples:
            leaves[name] = jnp.stack([leaves[name], 0.5 * leaves[name] + 0.1], axis)
    return leaves


def loss_of(attend: Attention, program: Program) -> Callable[[Arrays], Any]:
    """Returns the loss of leaves: a number, or a number of each example."""
    loss = functools.partial(_loss, attend, program)
    if program.mode in ("vmap_grad", "grad_vmap"):
        return jax.vmap(loss, ({name: dict(program.examples).get(name) for name in program.trained},))
    if program.mesh == "shard_map":
        split = {name: _split_of(name) for name in program.trained}

        def of_device(leaves: Arrays) -> Any:
            return jax.lax.psum(loss(leaves), AXIS)

        return jax.shard_map(of_device, mesh=_mesh(), in_specs=(split,), out_specs=PartitionSpec())
    return loss


def _mesh(kind: Any = AxisType.Auto) -> Any:
    return jax.make_mesh((2,), (AXIS,), axis_types=(kind,))


def _split_of(name: str) -> PartitionSpec:
    return PartitionSpec(AXIS) if name in OPERANDS[:3] else PartitionSpec()


def _loss(attend: Attention, program: Program, leaves: Arrays) -> Any:
    frozen = FROZEN
    if program.mesh == "shard_map":
        frozen = {
            name: array[: array.shape[0] // 2] if name in OPERANDS[:3] else array for name, array in FROZEN.items()
        }
    leaves = {**frozen, **leaves}
    x, total = leaves["query"].astype(program.dtype), jnp.zeros(())
    for number, layer in enumerate(program.layers):
        x, more = _run_layer(attend, program, layer, number, leaves, frozen, x)
        total = total + more
    x = x.astype(jnp.float32)
    return (x * WEIGHT[: x.shape[0]]).sum() + 0.1 * (x**2).sum() + total


def _run_layer(
    attend: Attention, program: Program, layer: Layer, number: int, leaves: Arrays, frozen: Arrays, x: Any
) -> tuple[Any, Any]:
    def pick(role: str, source: str) -> Any:
        array = {**leaves, "x": x, "frozen": frozen[role]}[source].astype(program.dtype)
        if role != "query":
            array = array[:, : SHORT if layer.is_short else ROWS, :HEADS_KEY]
        return jax.lax.stop_gradient(array) if role in layer.stopped else array

    operands = {role: pick(role, getattr(layer, role)) for role in OPERANDS[:3]}
    for role in ("bias", "sinks"):
        operands[role] = {"none": None, "trained": leaves[role], "frozen": frozen[role]}[getattr(layer, role)]
    if operands["bias"] is not None:
        operands["bias"] = operands["bias"][..., : operands["key"].shape[1]].astype(program.dtype)
    operands["ranges"] = None
    if layer.ranges != "none":
        operands["ranges"] = tuple(edge[: len(x)] for edge in _edges(RANGES[layer.ranges], number))
    key = jax.random.fold_in(KEY, number)

    def call(operands: Arrays, key: Any) -> tuple[Any, Any]:
        output, lse = attend(layer, operands, key)
        if layer.logsumexp != "used":
            return output, jnp.zeros(())
        return output, jnp.sin(jnp.where(jnp.isneginf(lse), 0.0, lse)).sum()

    if layer.wrap == "jit":
        call = jax.jit(call)
    if layer.wrap.startswith("remat"):
        policies = jax.checkpoint_policies
        policy = {
            "remat": None,
            "remat_names": policies.save_only_these_names("cutlass_py_attn"),
            "remat_dots": policies.dots_saveable,
        }[layer.wrap]
        call = jax.checkpoint(call, policy=policy)
    if layer.wrap == "scan":
        return _scanned(call, layer, operands, key)
    if layer.wrap == "vmap":
        return _mapped(call, layer, operands, key)
    return call(operands, key)


def _scanned(call: Any, layer: Layer, operands: Arrays, key: Any) -> tuple[Any, Any]:
    """Applies a call twice, with other values and sinks, and adds its results to query."""

    def body(carry: Any, inputs: Any) -> Any:
        x, total = carry
        factor, own_key = inputs
        own = {**operands, "query": x, "value": operands["value"] * factor.astype(x.dtype)}
        own["sinks"] = None if operands["sinks"] is None else operands["sinks"] * factor
        output, more = call(own, own_key if layer.dropout == "split" else key)
        return (x + output, total + more), None

    query = operands["query"]
    start = query, (query.sum() * 0).astype(jnp.float32)  # in shard_map a sum varies over devices as query does
    (output, total), _ = jax.lax.scan(body, start, (jnp.float32([1.0, 0.5]), jax.random.split(key, 2)))
    return output, total


def _mapped(call: Any, layer: Layer, operands: Arrays, key: Any) -> tuple[Any, Any]:
    """Maps a call over two elements, and adds their results."""
    places = dict(zip(OPERANDS, (*layer.axes[:3], 1, 1), strict=True))
    names = [name for name in OPERANDS if name in layer.mapped and operands[name] is not None]
    maps_ranges = "ranges" in layer.mapped and operands["ranges"] is not None
    names = names if names or maps_ranges or layer.dropout == "split" else ["query"]
    axes: dict[str, Any] = {name: places[name] if name in names else None for name in operands}
    stacked = {
        name: jnp.stack([array, 0.5 * array], places[name]) if name in names else array
        for name, array in operands.items()
    }
    if maps_ranges:
        start, end = operands["ranges"]
        axes["ranges"], stacked["ranges"] = (None, 1), (start, jnp.stack([end, end - 1], 1))
    keys = jax.random.split(key, 2) if layer.dropout == "split" else key
    mapped = jax.vmap(call, (axes, 0 if layer.dropout == "split" else None), (layer.axes[3], 0))
    output, total = mapped(stacked, keys)
    return output.sum(layer.axes[3]), total.sum()


def function_of(attend: Attention, program: Program) -> Callable[[Arrays], Any]:
    """Returns the program as a function of its leaves: to a tree of arrays, the loss first, then derivatives."""
    loss = loss_of(attend, program)
    one = functools.partial(_loss, attend, program)

    def whole(leaves: Arrays) -> Any:
        directions = {name: jnp.cos(3 * array) for name, array in leaves.items()}
        if program.mode == "grad":
            return None, jax.grad(loss)(leaves)
        if program.mode == "value_and_grad":
            return jax.value_and_grad(loss)(leaves)
        if program.mode == "vjp_reuse":
            value, pull = jax.vjp(loss, leaves)
            first = pull(jnp.ones_like(value))[0]
            some = sorted(leaves)[0]
            other = jax.grad(lambda array: loss({**leaves, some: array}))(leaves[some])
            second = pull(jnp.ones_like(value))[0]
            return value, jax.tree.map(lambda a, b: (a + b) / 2, first, second), other
        if program.mode == "vmap_grad":
            axes = {name: dict(program.examples).get(name) for name in leaves}
            return loss(leaves), jax.vmap(jax.grad(one), (axes,))(leaves)
        if program.mode == "grad_vmap":
            return None, jax.grad(lambda leaves: loss(leaves).sum())(leaves)
        if program.mode == "jvp":
            return jax.jvp(loss, (leaves,), (directions,))
        if program.mode == "linearize":
            value, linear = jax.linearize(loss, leaves)
            return value, linear(directions), linear(jax.tree.map(lambda array: -array, directions))
        if program.mode == "jvp_of_grad":
            return jax.jvp(jax.grad(loss), (leaves,), (directions,))
        return jax.grad(lambda leaves: jax.jvp(loss, (leaves,), (directions,))[1])(leaves)

    return whole


def results(attend: Attention, program: Program, leaves: Arrays, is_jitted: bool) -> Any:
    """Returns what the program computes."""
    whole = function_of(attend, program)
    run = jax.jit(whole) if is_jitted else whole
    if program.mesh == "none":
        return run(leaves)
    mesh = _mesh(AxisType.Explicit if program.mesh == "explicit" else AxisType.Auto)
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(array, NamedSharding(mesh, _split_of(name))) for name, array in leaves.items()}
        return run(placed)
