"""plan/: laws that hold for every problem without reasons."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlass_py_attn.errors import DoesNotFit, NotSupported
from cutlass_py_attn.kernels.sm80_split_d.layout import blocks_per_tile
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.build import Buffer, Build
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.launch.variants import PER_HEAD, QUERY_HEADS
from cutlass_py_attn.plan import planner, resources
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.planner import plan_backward, plan_forward, plan_with_tile
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Window
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import ITEM_BYTES, Shape, Tensor
from tests.support.any_problem import ARCHS, HEAD_DIMS, problems
from tests.support.refusals import expect
from tests.support.requests import SHAPE, dense, with_terms

LAW = settings(max_examples=100, deadline=None)
WHOLE_BIAS = (2, 3, 40, 50)
EVEN_BIAS = (2, 3, 40, 56)  # rows of whole 16-byte vectors
EVEN = dataclasses.replace(SHAPE, num_keys=56)


def plan_of(problem: Problem, arch: str = "sm_90") -> Plan:
    return (plan_forward if problem.direction == "forward" else plan_backward)(problem, arch)


BACKWARD = Problem.dense("backward", Shape(2, 300, 500, 3, 72, 64), "bfloat16", masks.Causal())
PLAN = plan_of(BACKWARD.replace(deterministic=True), "sm_80")


@LAW
@given(problems(), ARCHS)
def test_a_problem_without_reasons_has_a_plan_that_fits(problem: Problem, arch: str) -> None:
    assert problem.reasons() == []
    plan = plan_of(problem, arch)
    resources.check(plan.build, architecture(arch))
    assert (plan.launches == ()) == problem.is_empty
    roles = entry_points.entries(plan.build)
    if plan.num_splits_key == 1:
        roles.pop("combine", None)
    assert [launch.symbol for launch in plan.launches] == ([] if problem.is_empty else list(roles.values()))
    for launch in plan.launches:
        assert launch.shared_memory_bytes <= architecture(arch).shared_memory_per_block
        assert min(launch.grid) >= 1
        assert max(launch.grid[1:]) <= 65535
        assert launch.param_overrides == ()


@LAW
@given(problems(), ARCHS)
def test_a_plan_is_a_value(problem: Problem, arch: str) -> None:
    plan = plan_of(problem, arch)
    assert Plan.from_json(plan.to_json()) == plan
    assert hash(Plan.from_json(plan.to_json())) == hash(plan)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.reason = "because"  # type: ignore[misc]


def test_json_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown fields"):
        Plan.from_json(PLAN.to_json().replace('"reason"', '"why"'))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Build)])
def test_every_field_of_a_build_changes_its_digest(name: str) -> None:
    value = getattr(PLAN.build, name)
    changes: dict[type, Any] = {str: f"{value}x", int: 77, bool: not value, tuple: () if value else ("alibi",)}
    assert dataclasses.replace(PLAN.build, **{name: changes[type(value)]}).digest != PLAN.build.digest


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Buffer)])
def test_every_field_of_a_buffer_changes_the_digest(name: str) -> None:
    first, *others = PLAN.build.shared_memory
    value: Any = "x" if name == "name" else 7
    changed = dataclasses.replace(first, **{name: value})
    assert dataclasses.replace(PLAN.build, shared_memory=(changed, *others)).digest != PLAN.build.digest


_named: dict[tuple[str, str], Build] = {}


@LAW
@given(problems(), ARCHS)
def test_a_symbol_names_one_build(problem: Problem, arch: str) -> None:
    """Else two kernels would take each other's place in a folder of prebuilt ones."""
    build = plan_of(problem, arch).build
    assert _named.setdefault((arch, build.symbol), build) == build
    assert "cutlass" not in build.symbol


KINDS = st.fixed_dictionaries(
    {
        "direction": st.sampled_from(["forward", "backward"]),
        "dtype": st.sampled_from(sorted(ITEM_BYTES)),
        "dims": st.tuples(HEAD_DIMS, HEAD_DIMS),
        "form": st.sampled_from(masks.FORMS),
        "features": st.sets(st.sampled_from(["alibi", "bias", "dropout", "grouped", "sinks", "softcap", "varlen"])),
        "deterministic": st.booleans(),
        "few": st.booleans(),
    }
)
MASKS_OF_FORM = {
    "full": st.just(Full()),
    "causal": st.sampled_from([Causal(), CausalBottomRight(), Window(None, 3)]),
    "local": st.builds(Window, st.integers(0, 90), st.integers(0, 90)) | st.builds(Causal, st.integers(1, 90)),
}


@st.composite
def with_numbers(draw: st.DrawFn, kind: dict[str, Any]) -> Problem:
    """A problem of this kind with whatever decides no machine code."""
    has, dtype = kind["features"].__contains__, kind["dtype"]
    lengths = st.integers(17, 5000)
    heads_key, group = draw(st.integers(1, 20)), draw(st.integers(2, 5)) if has("grouped") else 1
    # The kernels of few queries are others than those of many.
    queries, keys = (st.integers(2, 3), st.integers(32, 600)) if kind["few"] else (lengths, st.integers(1, 600))
    sizes = draw(st.integers(1, 9)), draw(queries), 8 * draw(keys)
    dims, tokens = kind["dims"], sizes[1:] if has("varlen") else None
    shape = Shape(*sizes, group * heads_key, dims[0], dims[1], heads_key, tokens)
    problem = Problem.dense(kind["direction"], shape, dtype, draw(MASKS_OF_FORM[kind["form"]]))
    batch, row, head, column = problem.query.strides
    wide = dataclasses.replace(problem.query, strides=(2 * batch, 2 * row, head, column))
    # Not below 0, which the forward on Hopper leaves to the sm80 family.
    changes: dict[str, Any] = {"scale": draw(st.just(0.0) | st.floats(1e-30, 2)), "query": wide}
    if has("alibi"):
        slopes = draw(st.sampled_from([(shape.num_heads,), (shape.batch, shape.num_heads)]))
        changes["alibi_slopes"] = Tensor.contiguous(slopes, "float32")
    if has("bias"):  # in rows of whole vectors
        strides = draw(st.tuples(*[st.integers(0, 99).map(lambda n: 8 * n)] * 3))
        changes["bias"] = Tensor(shape.bias, (*strides, 1), dtype)
    if has("dropout"):
        changes |= {"dropout_p": draw(st.floats(0.1, 1)), "philox_on_device": draw(st.booleans())}
    changes["softcap"] = draw(st.floats(1, 90)) if has("softcap") else 0.0
    changes["sinks"] = Tensor.contiguous((shape.num_heads,), "float32") if has("sinks") else None
    return problem.replace(**changes, deterministic=kind["deterministic"])


@LAW
@given(KINDS, ARCHS, st.data())
def test_sizes_strides_and_numbers_share_the_build(kind: dict[str, Any], arch: str, data: st.DataObject) -> None:
    """But for kernels of some lengths, and tiles chosen for them: those that stand behind them serve any lengths."""
    first, second = (planner.plans(data.draw(with_numbers(kind)), arch, any_length=True)[0].build for _ in range(2))
    assert first == second
    assert set(first.features) == kind["features"]


@LAW
@given(problems(), ARCHS)
def test_num_splits_key_is_within_the_key_tiles(problem: Problem, arch: str) -> None:
    plan = plan_of(problem, arch)
    key_tiles = max(-(-problem.shape.num_keys // plan.build.tile_n), 1)
    assert 1 <= plan.num_splits_key <= key_tiles
    if problem.direction == "forward":
        assert plan.num_splits_key == 1 or plan.build.family == "decode"
    elif problem.num_splits_key is not None:
        assert plan.num_splits_key == min(problem.num_splits_key, key_tiles)


@LAW
@given(problems(), ARCHS)
def test_the_workspace_is_no_larger_than_gradient_turns_and_row_statistics(problem: Problem, arch: str) -> None:
    plan = plan_of(problem, arch)
    build, space, shape = plan.build, plan.workspace, problem.shape
    if problem.direction == "forward" or problem.is_empty:
        rows = shape.batch * shape.num_heads * shape.num_queries * plan.num_splits_key
        parts = {"partial_output": rows * build.columns_value * 4, "partial_logsumexp": rows * 4}
        is_split = plan.num_splits_key > 1 and not problem.is_empty
        assert {part.name: part.bytes for part in space.buffers} == (parts if is_split else {})
        assert space.zero_bytes == 0
        _disjoint([(part.offset, part.bytes) for part in space.buffers], space.bytes)
        return
    tiles = shape.num_heads * dict(plan.params)["total_tiles"]
    held = -(-build.columns // build.block_columns) * build.block_columns  # whole blocks of columns
    counters = tiles * held // 16 + shape.num_heads * shape.batch * blocks_per_tile(build)
    needed = 4 * (tiles * build.tile_m * (held + 2) + counters)
    if build.variant == QUERY_HEADS:
        key_rows = shape.num_heads_key * dict(plan.params)["total_key_tiles"] * build.tile_n
        needed += 4 * key_rows * (build.columns + build.columns_value)
    assert space.bytes <= needed + 256 * len(space.buffers)
    _disjoint([(part.offset, part.bytes) for part in space.buffers], space.bytes)
    expected = []
    if problem.grad_query is not None:
        has_order = build.deterministic and build.variant != PER_HEAD
        expected += ["grad_query_accum", "dq_semaphore"] if has_order else ["grad_query_accum"]
    expected += ["grad_key_accum", "grad_value_accum"] if build.variant == QUERY_HEADS else []
    has_counter = build.variant != PER_HEAD if build.family == "sm90" else build.deterministic
    expected += ["tile_count_semaphore"] if has_counter else []
    names = [part.name for part in space.buffers]
    assert names == [*expected, "delta", "logsumexp_log2"]
    is_zeroed = not (build.variant == PER_HEAD or entry_points.delta_clears_sums(build))
    assert [part.name for part in space.buffers if part.offset < space.zero_bytes] == (expected if is_zeroed else [])


@LAW
@given(problems(), ARCHS)
def test_shared_memory_buffers_are_disjoint_or_alive_at_other_steps(problem: Problem, arch: str) -> None:
    build = plan_of(problem, arch).build
    _disjoint([(buffer.offset, buffer.bytes) for buffer in build.shared_memory], build.shared_memory_bytes)
    assert all(buffer.offset % 128 == 0 and buffer.first <= buffer.last for buffer in build.shared_memory)


def _disjoint(pieces: list[tuple[int, int]], total: int) -> None:
    for (first, first_bytes), (second, second_bytes) in combinations(pieces, 2):
        assert first + first_bytes <= second or second + second_bytes <= first
    assert max((offset + size for offset, size in pieces), default=0) <= total


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(0, 500), max_size=30), st.integers(0, 200), st.sampled_from(["float16", "float32"]))
def test_sequences_share_the_query_tiles(lengths: list[int], unused: int, dtype: str) -> None:
    """Sequence b starts at tile cu_seqlens_q[b] // tile_m + b: no two meet, and the last ends within all tiles."""
    tokens = sum(lengths) + unused
    shape = Shape(len(lengths), max(lengths, default=0), 9, 2, 64, 64, tokens=(tokens, 9))
    plan = plan_of(Problem.dense("backward", shape, dtype))
    tile_m, taken, start = plan.build.tile_m, 0, 0
    for number, length in enumerate(lengths):
        first = start // tile_m + number
        assert first >= taken
        taken, start = first + -(-length // tile_m), start + length
    assert taken <= dict(plan.params)["total_tiles"] <= tokens / tile_m + len(lengths)


PIECES: dict[tuple[int, int], list[tuple[tuple[int, ...], int, int]]] = {
    (1, 1): [((), 1, 1)],
    (65535, 65535): [((), 65535, 65535)],
    (65536, 3): [((0, 0), 65535, 3), ((65535, 0), 1, 3)],
    (2, 131071): [((0, 0), 2, 65535), ((0, 65535), 2, 65535), ((0, 131070), 2, 1)],
    (65537, 65536): [((0, 0), 65535, 65535), ((0, 65535), 65535, 1), ((65535, 0), 2, 65535), ((65535, 65535), 2, 1)],
}


@pytest.mark.parametrize(("heads", "batch"), PIECES)
def test_grids_in_pieces(heads: int, batch: int) -> None:
    """y and z of a grid end at 65535: the launches of one kernel share the heads and batches."""
    wanted = [
        ((("first_head", at[0]), ("first_batch", at[1])) if at else (), (y, z)) for at, y, z in PIECES[heads, batch]
    ]
    shape = Shape(batch, 300, 500, heads, 64, 64)
    bias = Tensor.contiguous((batch, heads, 1, 1), "float16")
    backward = Problem.dense("backward", shape, "float16").replace(bias=bias, grad_bias=bias)
    plan = plan_of(backward)
    for role, symbol in entry_points.entries(plan.build).items():
        pieces = [launch for launch in plan.launches if launch.symbol == symbol]
        assert [(piece.param_overrides, piece.grid[1:]) for piece in pieces] == wanted, role
        assert len({piece.grid[0] for piece in pieces}) == 1
    forward = plan_of(Problem.dense("forward", shape, "float16"))
    assert [(piece.param_overrides, piece.grid[1:]) for piece in forward.launches] == wanted


def test_grids() -> None:
    """Forward, delta and finish: a query head each; the main backward: a key head; grad_bias: what it has of them."""
    shape = Shape(2, 300, 500, 6, 64, 64, num_heads_key=3)
    sinks, bias = Tensor.contiguous((6,), "float32"), Tensor.contiguous((2, 1, 300, 500), "float16")
    problem = Problem.dense("backward", shape, "float16").replace(
        bias=bias, grad_bias=bias, sinks=sinks, grad_sinks=sinks, num_splits_key=2
    )
    plan = plan_of(problem)
    m, n = plan.build.tile_m, plan.build.tile_n
    tiles_m, tiles_n = -(-300 // m), -(-500 // n)
    grids = dict(zip(entry_points.entries(plan.build), (launch.grid for launch in plan.launches), strict=True))
    assert grids == {
        "delta": (tiles_m * m // 16, 6, 2),
        "main": (2, 3, 2),
        "finish": (tiles_m, 6, 2),
        "bias": (tiles_m * tiles_n, 1, 2),
        "sinks": (6, 1, 1),
    }
    assert plan_of(Problem.dense("forward", shape, "float16")).launches[0].grid == (-(-300 // 128), 6, 2)


def test_wide_heads_are_shared_by_blocks_of_columns() -> None:
    plan = plan_of(Problem.dense("forward", Shape(2, 300, 500, 3, 64, 1100), "float16"))
    build = plan.build
    assert build.head_dim_split
    assert blocks_per_tile(build) == -(-1100 // build.head_dim_split) > 1
    assert plan.launches[0].grid == (-(-300 // build.tile_m) * blocks_per_tile(build), 3, 2)
    assert f"{blocks_per_tile(build)} blocks of {build.head_dim_split} columns" in plan.explain()


DQ, DK, DV = "grad_query", "grad_key", "grad_value"
ENTRIES: dict[str, tuple[tuple[str, ...], tuple[int, ...], str, str]] = {
    "q k v": ((DQ, DK, DV), (), "", "delta_1 main_0 finish_2"),
    "q": ((DQ,), (), "to_q", "delta_1 main_0 finish_2"),
    "k v": ((DK, DV), (), "to_kv", "delta_1 main_0"),
    "q k v and a bias as it is": ((DQ, DK, DV), EVEN_BIAS, "to_qkvb", "delta_1 main_0 finish_2"),
    "v and a sum over heads": ((DV,), (2, 1, 40, 56), "to_vb_sum_h", "delta_1 main_0 bias_2"),
    "a sum over all": ((), (1, 1, 1, 1), "to_b_ga2_sum_bhqk", "delta_0 bias_1"),
    "a bias alone": ((), EVEN_BIAS, "to_b_sum_none", "delta_0 bias_1"),
}


@pytest.mark.parametrize(("wanted", "grad_bias", "words", "roles"), ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_entries_of_gradients(
    wanted: tuple[str, ...], grad_bias: tuple[int, ...], words: str, roles: str, with_sinks: bool
) -> None:
    """Only the kernels that the gradients need, in the order of their launches and with the compiler's numbers."""
    terms: dict[str, Any] = {name: None for name in (DQ, DK, DV) if name not in wanted}
    terms |= {"bias": EVEN_BIAS, "grad_bias": grad_bias} if grad_bias else {}
    terms |= {"sinks": (3,), "grad_sinks": (3,)} if with_sinks else {}
    plan = plan_of(with_terms("backward", EVEN, **terms))
    expected = roles.split()
    if with_sinks:
        expected.append(f"sinks_{len(expected)}")
        words = words.replace("b", "bs", 1) if "b" in words else f"{words}s" if words else "to_qkvs"
    found = [f"{role}_{symbol.rpartition('_')[2]}" for role, symbol in entry_points.entries(plan.build).items()]
    assert found == expected
    assert [launch.symbol for launch in plan.launches] == list(entry_points.entries(plan.build).values())
    assert plan.build.has_main == any(entry.startswith("main") for entry in expected)
    assert plan.build.stem.endswith(words)


def test_grad_bias_behind_a_softcap_has_a_kernel_of_its_own() -> None:
    """The main kernel has dS only times the softcap's slope."""
    problem = with_terms("backward", bias=WHOLE_BIAS, grad_bias=WHOLE_BIAS)
    assert plan_of(problem).build.grad_bias_mode == "main"
    assert plan_of(problem.replace(softcap=3.0)).build.grad_bias_mode == "none"
    sums = with_terms("backward", bias=(1, 3, 1, 50), grad_bias=(1, 3, 1, 50))
    assert plan_of(sums).build.grad_bias_mode == "bq"
    one_batch = Problem.dense("backward", Shape(1, 1, 50, 3, 16, 16), "float16").replace(
        bias=sums.bias, grad_bias=sums.grad_bias
    )
    assert plan_of(one_batch).build.grad_bias_mode == "main", "there is nothing to sum over"


KEY = Tensor.contiguous((2, 50, 3, 16), "float16")
ACCESS: dict[str, tuple[Problem, tuple[int, int, int], str]] = {
    "whole vectors": (dense(), (16, 0, 0), "full"),
    "an odd head dim": (dense(head_dim=7), (2, 0, 0), "full_a2"),
    "an even head dim of values": (dense(head_dim_value=20), (8, 0, 0), "full_a8"),
    "a float32 of 4 bytes": (dense(dtype="float32", head_dim=65), (4, 0, 0), "full_a4"),
    "an address": (dense().replace(key=dataclasses.replace(KEY, alignment=4)), (4, 0, 0), "full_a4"),
    "a stride": (dense().replace(key=dataclasses.replace(KEY, strides=(2600, 52, 16, 1))), (8, 0, 0), "full_a8"),
    "the address of a result": (
        dense("backward").replace(grad_key=dataclasses.replace(KEY, alignment=8)),
        (8, 0, 0),
        "full_a8",
    ),
    "a bias of 50 keys": (with_terms(bias=WHOLE_BIAS), (16, 4, 0), "full_bias_ba4"),
    "a bias of 56 keys": (with_terms(base=EVEN, bias=EVEN_BIAS), (16, 16, 0), "full_bias"),
    "a bias whose rows are padded oddly": (
        dense(num_keys=56).replace(bias=Tensor(EVEN_BIAS, (6960, 2320, 58, 1), "float16")),
        (16, 4, 0),
        "full_bias_ba4",
    ),
    "a bias that broadcasts along odd strides": (
        dense(num_keys=56).replace(bias=Tensor((1, 3, 1, 56), (7, 0, 9, 1), "float16")),
        (16, 16, 0),
        "full_bias",
    ),
    "a transposed bias": (
        dense(num_keys=56).replace(bias=Tensor(EVEN_BIAS, (6720, 2240, 1, 40), "float16")),
        (16, 2, 0),
        "full_bias_ba2",
    ),
    "a bias of one key for all": (with_terms(bias=(2, 3, 40, 1)), (16, 2, 0), "full_bias_ba2"),
    "the address of a bias": (
        dense(num_keys=56).replace(bias=Tensor((1, 1, 1, 56), (0, 0, 0, 1), "float16", 8)),
        (16, 8, 0),
        "full_bias_ba8",
    ),
    "another layout of its gradient": (
        with_terms("backward", EVEN, bias=EVEN_BIAS).replace(
            grad_bias=Tensor(EVEN_BIAS, (6960, 2320, 58, 1), "float16")
        ),
        (16, 16, 4),
        "full_bias_to_qkvb_ga4",
    ),
}


@pytest.mark.parametrize(("problem", "access", "words"), ACCESS.values(), ids=ACCESS)
def test_access(problem: Problem, access: tuple[int, int, int], words: str) -> None:
    """The widest loads that addresses, strides and row lengths allow, for the operands, bias and grad_bias apart."""
    build = plan_of(problem).build
    assert (build.vector_bytes, build.bias_vector_bytes, build.grad_bias_vector_bytes) == access
    assert build.stem.split("_", 4)[4] == words


@pytest.mark.parametrize(
    ("mask", "edges"),
    [
        (Full(), (masks.UNLIMITED, masks.UNLIMITED, 0)),
        (CausalBottomRight(), (masks.UNLIMITED, 0, 1)),
        (Causal(300), (299, 0, 0)),
        (Window(7, None), (7, masks.UNLIMITED, 1)),
    ],
    ids=str,
)
def test_edges_are_numbers(mask: masks.Mask, edges: tuple[int, int, int]) -> None:
    sizes = dict(plan_of(dense().replace(mask=mask)).params)
    assert tuple(sizes[name] for name in ("window_left", "window_right", "bottom_right")) == edges


@pytest.mark.parametrize("dropout_p", [0.0, 0.25, 0.5, 0.7, 1.0])
def test_dropout_threshold_is_an_unsigned_word(dropout_p: float) -> None:
    word = dict(plan_of(dense().replace(dropout_p=dropout_p)).params)["dropout_threshold"]
    assert -(2**31) <= word < 2**31
    assert (word % 2**32) / 2**32 == pytest.approx(dropout_p, abs=1e-6)


def test_a_deterministic_backward_refuses_blocks_that_would_wait() -> None:
    turns = BACKWARD.replace(deterministic=True)
    key_tiles = PLAN.num_splits_key
    assert key_tiles == -(-500 // PLAN.build.tile_n)
    for asked, blocks in ((None, key_tiles), (1, 1)):
        assert plan_backward(turns.replace(num_splits_key=asked), "sm_80").num_splits_key == blocks
    with pytest.raises(NotSupported, match=r"num_splits_key = 2 .*: must be 1 with deterministic"):
        plan_backward(turns.replace(num_splits_key=2), "sm_80")
    assert not plan_of(turns.replace(grad_query=None)).build.deterministic, "only the query gradient is summed"


def test_the_rings_of_the_backward_must_be_equal() -> None:
    limits = architecture("sm_80")
    assert resources.refusals(PLAN.build, limits) == []
    stages = PLAN.build.query_stages
    found = resources.refusals(dataclasses.replace(PLAN.build, grad_output_stages=stages + 1), limits)
    expect(found, [f"grad_output_stages: must be query_stages = {stages}"])


def test_tiles_are_whole_copies() -> None:
    """32 rows of 32 columns are half of what 256 threads copy at once."""
    problem = Problem.dense("forward", Shape(1, 64, 64, 1, 32, 32), "float16")
    with pytest.raises(
        DoesNotFit, match=r"tile_n = 32 \(int\): 256 threads copy 64 rows at once; use a multiple of that"
    ):
        plan_with_tile(problem, "sm_90", TileConfig(128, 32, 8), family="sm80")


def test_the_direction_must_match() -> None:
    with pytest.raises(NotSupported, match="must be forward, which plan_forward plans"):
        plan_forward(BACKWARD, "sm_80")
    with pytest.raises(NotSupported, match=r"arch = .*: must be one of sm_80"):
        plan_backward(BACKWARD, "sm_70")
