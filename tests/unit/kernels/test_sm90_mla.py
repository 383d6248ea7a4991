"""Tests of kernels/sm90_mla/layout.py: slots, order of chunks, shared memory, the teams, and the planner's choice."""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.kernels.catalogue import fused_kernel_of
from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.kernels.sm90_mla.layout import (
    CHUNKS,
    HALVES,
    P_STRIP,
    SLOTS,
    STRIPS,
    VALUE_CHUNKS,
    VALUE_STRIPS,
    registers,
)
from cutlass_py_attn.launch import abi, entry_points
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.tile_config import TileConfig
from cutlass_py_attn.plan import launch_rules, planner, preconditions, resources
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import parse
from cutlass_py_attn.problem.tensors import Tensor

ARCH = "sm_90a"
BASE = "bf16_d576v512_q1_s8192_b64_h128k1_full_mla"
PAGED = f"{BASE.removesuffix('_mla')}_paged64_mla"


def plan_of(name: str, num_sms: int | None = None) -> Plan:
    """Returns the best plan of a spec."""
    return planner.plan(parse(name).problem("forward"), ARCH, num_sms)


def numbers(name: str, *, num_sms: int = 132) -> dict[str, int]:
    """Returns the numbers of a spec's schedule."""
    problem = parse(name).problem("forward")
    return launch_rules.values(problem, planner.plan(problem, ARCH, num_sms).build, num_sms)


def test_chunks_and_halves_have_every_strip_once() -> None:
    assert list(itertools.chain(*CHUNKS)) == list(range(STRIPS))
    assert all(sorted(itertools.chain(*halves)) == list(range(len(CHUNKS))) for halves in HALVES)
    columns = [[strip for chunk in chunks for strip in CHUNKS[chunk]] for chunks in VALUE_CHUNKS]
    assert columns == [list(range(4)), list(range(4, VALUE_STRIPS))]
    assert all(halves[0][0] == 0 for halves in HALVES), "the first chunk that is multiplied starts S from zero"


def test_p_is_in_the_half_that_the_other_warpgroup_releases() -> None:
    (p_chunk,) = (number for number, strips in enumerate(CHUNKS) if P_STRIP in strips)
    assert CHUNKS[p_chunk] == (P_STRIP,)
    assert P_STRIP >= VALUE_STRIPS
    for slot in range(SLOTS):
        assert p_chunk in HALVES[slot][1 - slot]
        for half in range(2):  # a warpgroup releases the half with its columns of the value
            assert set(VALUE_CHUNKS[half]) <= set(HALVES[slot][half])


Action = tuple[Any, ...]


def scores(slot: int, halves: Sequence[int], use: int, tile: int) -> Iterator[Action]:
    for half in halves:
        for chunk in HALVES[slot][half]:
            yield "full", slot, chunk, use
            yield "read", slot, chunk, tile


def output(warpgroup: int, slot: int, tile: int) -> Iterator[Action]:
    """What O += P V of a slot reads: at its start, and still at its end."""
    for chunk in VALUE_CHUNKS[warpgroup]:
        yield "read", slot, chunk, tile
    if slot != warpgroup:
        yield "read", slot, 4, ("p", tile)


def multiply_other(warpgroup: int, use: int, tile: int) -> Iterator[Action]:
    other = 1 - warpgroup
    yield "wait", other
    for chunk in VALUE_CHUNKS[warpgroup]:
        yield "full", other, chunk, use
    yield from output(warpgroup, other, tile)


def weights(warpgroup: int, tile: int) -> Iterator[Action]:
    for chunk in range(5):
        yield "read", warpgroup, chunk, tile  # S has ended only now
    yield "write", warpgroup, 4, ("p", tile)
    yield "arrive", warpgroup


def multiply_own(warpgroup: int, tile: int) -> Iterator[Action]:
    yield from weights(warpgroup, tile)
    yield from output(warpgroup, warpgroup, tile)
    yield from output(warpgroup, warpgroup, tile)
    yield "release", warpgroup, warpgroup


def program(warpgroup: int, pieces: Sequence[int]) -> Iterator[Action]:
    """What a warpgroup of kernels/sm90_mla/decode.py does for pieces of so many latent tiles."""
    first, uses = 0, [0, 0]
    for tiles in pieces:
        yield ("meet",)
        yield ("meet",)
        if warpgroup == 0:
            yield from scores(0, (0, 1), uses[0], first)
            for pair in range((tiles - 1) // 2):
                tile = first + 2 * pair
                yield from multiply_own(0, tile)
                yield from multiply_other(0, uses[1] + pair, tile + 1)
                yield from scores(0, (0,), uses[0] + pair + 1, tile + 2)
                yield from output(0, 1, tile + 1)
                yield "release", 1, 0
                yield from scores(0, (1,), uses[0] + pair + 1, tile + 2)
            last = first + (tiles - 1) // 2 * 2
            yield from multiply_own(0, last)
            if tiles % 2 == 0:
                yield from multiply_other(0, uses[1] + (tiles - 1) // 2, last + 1)
                yield from output(0, 1, last + 1)
                yield "release", 1, 0
        else:
            for pair in range(tiles // 2):
                tile = first + 2 * pair
                yield from scores(1, (0, 1), uses[1] + pair, tile + 1)
                yield from multiply_other(1, uses[0] + pair, tile)
                yield from weights(1, tile + 1)
                yield from output(1, 0, tile)
                yield "release", 0, 1
                yield from output(1, 1, tile + 1)
                yield from output(1, 1, tile + 1)
                yield "release", 1, 1
            if tiles % 2 == 1:
                yield from multiply_other(1, uses[0] + tiles // 2, first + tiles - 1)
                yield from output(1, 0, first + tiles - 1)
                yield "release", 0, 1
        yield ("meet",)  # both leave the sums of their rows
        uses = [uses[0] + (tiles + 1) // 2, uses[1] + tiles // 2]
        first += tiles


def loads(pieces: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """(slot, half, use of the slot, latent tile) in the order in which the producer loads them."""
    first, uses = 0, [0, 0]
    for tiles in pieces:
        for number in range(tiles):
            slot = number % 2
            for half in range(2):
                yield slot, half, uses[slot] + number // 2, first + number
        uses = [uses[0] + (tiles + 1) // 2, uses[1] + tiles // 2]
        first += tiles


class Model:
    """One producer and two warpgroups. Anything that can go on may be the next to do so; copies arrive in any order."""

    def __init__(self, pieces: Sequence[int], seed: int, halves: Sequence[Any] = HALVES) -> None:
        self.rng, self.halves = random.Random(seed), halves
        self.queue = deque(loads(pieces))
        self.programs = [program(warpgroup, pieces) for warpgroup in range(2)]
        self.pending: list[Action | None] = [next(each, None) for each in self.programs]
        self.full = {(slot, chunk): 0 for slot in range(SLOTS) for chunk in range(len(CHUNKS))}  # phases that ended
        self.empty = {(slot, half): 0 for slot in range(SLOTS) for half in range(2)}
        self.memory: dict[tuple[int, int], Any] = {}
        self.copies: list[tuple[int, int, int]] = []
        self.named = [0, 0]  # arrivals at the barrier of each slot's P
        self.met, self.is_waiting = [0, 0], [False, False]  # at the barrier of both

    def load(self) -> bool:
        if not self.queue:
            return False
        slot, half, use, tile = self.queue[0]
        if self.empty[slot, half] % 2 == (use % 2 ^ 1):  # the wait's parity is (use & 1) ^ 1
            return False
        self.queue.popleft()
        self.copies += [(slot, chunk, tile) for chunk in self.halves[slot][half]]
        return True

    def copy(self) -> bool:
        if not self.copies or self.rng.random() < 0.5:
            return False
        slot, chunk, tile = self.copies.pop(self.rng.randrange(len(self.copies)))
        self.memory[slot, chunk] = tile
        self.full[slot, chunk] += 1
        return True

    def act(self, warpgroup: int) -> bool:
        action = self.pending[warpgroup]
        if action is None:
            return False
        kind, *rest = action
        if kind == "full":
            slot, chunk, use = rest
            if self.full[slot, chunk] % 2 == use % 2:
                return False
        elif kind == "read":
            slot, chunk, what = rest
            assert self.memory[slot, chunk] == what, f"warpgroup {warpgroup} reads {self.memory[slot, chunk]}: {action}"
        elif kind == "write":
            slot, chunk, what = rest
            self.memory[slot, chunk] = what
        elif kind == "release":
            self.empty[rest[0], rest[1]] += 1
        elif kind == "arrive":
            self.named[rest[0]] += 1
            assert self.named[rest[0]] == 1, "a second arrival would end the phase without the other warpgroup"
        elif kind == "wait":
            if not self.named[rest[0]]:
                return False
            self.named[rest[0]] -= 1
        else:
            has_come = self.is_waiting[warpgroup]
            self.met[warpgroup] += not has_come
            self.is_waiting[warpgroup] = self.met[warpgroup] > self.met[1 - warpgroup]
            if self.is_waiting[warpgroup]:
                return not has_come
        self.pending[warpgroup] = next(self.programs[warpgroup], None)
        return True

    def run(self) -> None:
        """Runs to the end; AssertionError if a warpgroup reads anything but its tile, or nothing can go on."""
        agents: list[Callable[[], bool]] = [self.load, self.copy, self.copy]
        agents += [functools.partial(self.act, warpgroup) for warpgroup in range(2)]
        waits = 0
        while any(action is not None for action in self.pending):
            waits = 0 if self.rng.choice(agents)() else waits + 1
            assert waits < 1000, f"nothing can go on: {self.pending}"
        assert not self.queue
        assert not self.copies
        assert self.named == [0, 0]
        assert len(set(self.full.values())) <= 2
        assert all(self.empty[slot, half] == self.full[slot, 0] for slot, half in self.empty)


@pytest.mark.parametrize("pieces", [(1,), (2,), (3,), (4,), (9,), (1, 1, 1), (2, 1, 4, 3), (3, 3, 2, 1, 5), (8, 7)])
def test_warpgroups_read_their_tiles_whatever_is_late(pieces: tuple[int, ...]) -> None:
    for seed in range(40):
        Model(pieces, seed).run()


def test_a_half_that_is_released_too_early_is_read_wrong() -> None:
    """With P of slot 0 in the half of its own warpgroup, the next tile may be loaded over it."""
    wrong, failed = (((0, 1, 4), (2, 3)), ((0, 1, 4), (2, 3))), 0
    for seed in range(20):
        try:
            Model((9,), seed, wrong).run()
        except AssertionError as error:
            failed += "reads" in str(error)
    assert failed > 10


def test_shared_memory_has_the_query_tile_and_two_latent_tiles() -> None:
    build = plan_of(BASE).build
    found = {buffer.name: buffer.bytes for buffer in build.shared_memory}
    tile = 64 * 576 * 2
    assert found == {"query": tile, "ring": 2 * tile, "row_statistics": 1536, "barriers": 8 * 14, "schedule": 64}
    assert build.shared_memory_bytes <= architecture(ARCH).shared_memory_per_block
    assert resources.refusals(build, architecture(ARCH)) == []
    assert fused_kernel_of(build).accumulators(build) == 32 + 16 + 128


@pytest.mark.parametrize(
    "name",
    [
        BASE,
        PAGED,
        "f16_d576v512_q1_s1_b1_h1_full_paged16_mla",
        "bf16_d576v512_n3x900u333,1x64u0,0x20u20_h20k1_causal_br_paged32_mla",
        "bf16_d576v512_q300_s700_b2_h96k1_causal_mla",
        "bf16_d576v512_q2_s700_b2_h8k2_window_left100_right0_mla",
    ],
)
def test_what_the_kernel_takes(name: str) -> None:
    found = plan_of(name)
    assert (found.build.family, found.build.variant) == ("sm90", "mla")
    assert TileConfig.of(found.build) == TileConfig(64, 64, 12, 2, variant="mla")
    assert Plan.from_json(found.to_json()) == found
    assert [each.field for each in found.launches[0].tensor_maps] == ["key"]
    symbols = [launch.symbol for launch in found.launches]
    assert symbols == list(entry_points.entry_symbols(found.build))[: len(symbols)]  # one team needs no combine
    text = found.explain()
    assert "one warp loads keys, whose first columns are the values" in text
    assert "partial_output" in text


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        (BASE.removesuffix("_mla"), "head dims beyond 512"),
        ("f32_d576v512_q1_s64_b2_h8k1_full_mla", "float32"),
        ("bf16_d576v512_q1_s64_b2_h8k1_full_sinks_mla", "sinks"),
        ("bf16_d576v512_q1_s64_b2_h8k1_full_softcap4_mla", "softcap"),
        ("bf16_d576v512_q1_s64_b2_h8k1_full_scale-0.1_mla", "a scale below 0"),
        ("bf16_d576v512_n3x40,1x64_h8k1_full_mla", "variable lengths of keys that contain the values"),
        ("bf16_d576v512_q1_s64_b2_h8k1_full_paged8_mla", "pages of fewer than 16 rows"),
        ("bf16_d640v512_q1_s64_b2_h8k1_full_mla", "head dims beyond 512"),
    ],
)
def test_what_other_kernels_compute(name: str, lacking: str) -> None:
    problem = parse(name).problem("forward")
    assert lacking in sm90_choice.unsupported_features(problem)
    found = planner.plan(problem, ARCH)
    assert (found.build.family, found.build.variant) == ("sm80", "split_d")
    assert lacking in found.explain()


def test_narrower_rows_are_those_of_other_kernels() -> None:
    assert plan_of("bf16_d320v256_q1_s64_b2_h8k1_full_mla").build.variant == "wide"
    assert planner.plan(parse(PAGED).problem("forward"), "sm_90").build.family == "sm80"


def test_strides_lengths_and_pages_do_not_decide_the_kernel() -> None:
    problem = parse(PAGED).problem("forward")
    shape = problem.key.shape
    uneven = Tensor(shape, (64 * 640 + 8, 640, 640, 1), "bfloat16")  # pages at no whole number of rows
    other = problem.replace(key=uneven).with_value_in_key()
    assert planner.plan(other, ARCH).build == plan_of(PAGED).build
    for name in ("q1_s0_b3_h128k1", "q5_s70000_b1_h16k1"):
        assert plan_of(f"bf16_d576v512_{name}_full_paged64_mla").build == plan_of(PAGED).build


@pytest.mark.parametrize(
    ("sizes", "teams", "width"),
    [
        ("b64_h128k1", 64, 2),  # whole rows: 128 of 132 blocks
        ("b66_h128k1", 66, 2),
        ("b128_h128k1", 64, 2),  # two rows each
        ("b132_h64k1", 132, 1),
        ("b130_h16k1", 130, 1),
        ("b120_h64k1", 132, 1),  # 12 of 132 blocks would idle
        ("b8_h128k1", 66, 2),
        ("b65_h128k1", 65, 2),
        ("b131_h128k1", 66, 2),
    ],
)
def test_teams_have_whole_rows_if_hardly_a_block_idles(sizes: str, teams: int, width: int) -> None:
    for pages in ("", "_paged64"):
        found = numbers(f"bf16_d576v512_q1_s8192_{sizes}_full{pages}_mla")
        assert (found["num_teams"], found["team_rows"]) == (teams, width)
        assert found["num_blocks"] == teams * width <= 132


def test_few_keys_have_few_teams() -> None:
    found = numbers("bf16_d576v512_q1_s100_b1_h128k1_full_mla")
    assert (found["chunks"], found["num_teams"], found["num_blocks"]) == (3, 1, 2)


def test_the_struct_and_the_workspace_are_those_of_shared_chunks() -> None:
    found = plan_of(PAGED)
    fields = {name for name, _ in abi.fields_of(found.build)}
    assert {"partial_output", "schedule", "num_teams", "page_table", "key_page"} <= fields
    assert "value_page_rows" not in fields
    slots = 2 * 64 * 2 * 64
    sizes = {buffer.name: buffer.bytes for buffer in found.workspace.buffers}
    assert sizes == {"partial_output": slots * 512 * 4, "partial_logsumexp": slots * 4, "schedule": 64 * 8 * 4}


def test_preconditions_hold_and_bind_the_strides_of_value() -> None:
    problem = parse(PAGED).problem("forward")
    found = planner.plan(problem, ARCH)
    names = launch_rules.values(problem, found.build, 132) | _strides(problem) | {"scale": 1}
    for rule, says in [
        *preconditions.conditions(problem, found.build),
        *preconditions.limits(problem, found.build),
    ]:
        assert rule.evaluate(names) == 1, says
    texts = [says for rule, says in preconditions.conditions(problem, found.build)
             if not rule.evaluate(names | {"value_row": 512})]  # fmt: skip
    assert any(text.startswith("value_row must be key_row") for text in texts)


def _strides(problem: Problem) -> dict[str, int]:
    operands = problem.operands()
    return {
        field: step for name in ("query", "key", "value", "output") for field, step in operands[name].strides.items()
    }


CODES = f"{PAGED}_kv8_descaletile"


def test_a_cache_of_codes_has_the_map_of_its_16_bit_columns() -> None:
    plan, of_numbers = plan_of(CODES), plan_of(PAGED)
    main = plan.launches[0]
    (rope,) = main.tensor_maps
    assert (rope.field, rope.box, rope.swizzle_bytes) == ("key_rope", (64, 16, 1, 1), 128)
    assert rope.sizes[:2] == (64, 64)
    assert plan.build.shared_memory == of_numbers.build.shared_memory
    assert plan.build.features == ("grouped", "kv8", "kv8tile", "paged")
    assert main.grid == of_numbers.launches[0].grid
    names = [name for name, _ in abi.fields_of(plan.build)]
    assert {"key_scale_tile", "key_scale_page", "key_rope_head"} <= {*names}
    assert "value_scale" not in names
    assert sum(registers(plan.build)[side] * count for side, count in ((0, 1), (-1, 2))) == 504
    assert "scales of each 128 columns of a row" in plan.explain()
    assert "four warps load keys and convert their e4m3 codes" in plan.reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"{PAGED}_kv8_descalehead", "e4m3 codes of keys that contain the values without key_rope"),
        (CODES.replace("paged64", "paged8"), "pages of fewer than 16 rows"),
        (CODES.replace("d576v512", "d640v512"), "kv8tile"),
    ],
)
def test_refused_codes(name: str, reason: str) -> None:
    problem = parse(name).problem("forward")
    assert reason in sm90_choice.unsupported_features(problem)
    with pytest.raises(NotSupported):
        planner.plan(problem, ARCH)


def test_other_targets_refuse_codes() -> None:
    with pytest.raises(NotSupported, match="takes no targets without wgmma; use a cache of 16 bits"):
        planner.plan(parse(CODES).problem("forward"), "sm_80")


@pytest.mark.parametrize("target", ["sm_90a", "sm_90"])
def test_small_pages_of_codes_are_refused_with_the_pages_to_use(target: str) -> None:
    """As pages, not as head dims that other kernels of codes do not take."""
    problem = parse(CODES.replace("paged64", "paged1")).problem("forward")
    with pytest.raises(NotSupported) as refused:
        planner.plans_on(problem, (9, 0)) if target == "sm_90a" else planner.plans(problem, target)
    wanted = f"the kernel of {target} takes no pages of fewer than 16 rows; use pages of at least 16 rows, or a cache"
    assert any(wanted in reason for reason in refused.value.reasons)
    assert not any("head dims" in reason for reason in refused.value.reasons)
