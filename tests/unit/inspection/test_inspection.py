"""Tests of inspection: steps and marks, occupancy, grids, differences and pages, of toy kernels and real ones."""

from __future__ import annotations

import dataclasses
import random
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.compilation import cubin
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.inspection import drawing, facts, line_info, listing, page, sass, steps
from cutlass_py_attn.inspection.difference import difference, text_difference
from cutlass_py_attn.inspection.occupancy import MULTIPROCESSORS, occupancy
from cutlass_py_attn.inspection.steps import Step
from cutlass_py_attn.launch import entry_points
from cutlass_py_attn.launch.arch import ARCHITECTURES
from cutlass_py_attn.launch.expressions import Grid, Name
from cutlass_py_attn.plan import launch_rules
from cutlass_py_attn.plan.planner import plan_forward, plans
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import Shape
from tests.support import fakes
from tests.support.html_tags import unbalanced

KERNELS = Path(steps.PACKAGE, "kernels")
TOY = '''
class Toy:
    def kernel(self):
        """A toy."""
        ready()
        # 0  load
        load()
        for turn in turns:
            wait()
            # 1  S = Q K^T of the first, followed by 3  O += P V. The rest is prose
            matmul_qk.issue(gemms.mma_qk, a)
            matmul_pv.issue(self.mma_pv, b)
            grad_v.issue(gemms.mma_pdo, w)
            between()
            # 2  softmax
            soft(
                max
            )
            self.mma_pv.wait()
        behind()

    def dq(self):
        """dQ warpgroup: 7  dQ = dS K of a tile. More."""
        issue()
        grad_q.issue(self.mma_dsk, x)

    def helper(self):
        """Help, in one sentence. And another."""
        matmul_qk.wait(mma_qk, 1)
        self.other.issue(d)
        self.mma_pv.add(y)
'''


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    return path


def named(path: Path, text: str) -> tuple[str, str]:
    """Returns (name, title) of the step of the only line with this text."""
    (line,) = [number for number, found in enumerate(TOY.splitlines(), 1) if text == found.strip()]
    step = steps.step_of(path, line)
    assert step is not None
    return step.name, step.title


# steps


def test_lines_belong_to_the_numbered_comment_above_them(toy: Path) -> None:
    expected = {
        "ready()": ("kernel", "A toy"),
        "load()": ("0", "load"),
        "wait()": ("0", "load"),
        "matmul_qk.issue(gemms.mma_qk, a)": ("1", "S = Q K^T of the first"),
        "matmul_pv.issue(self.mma_pv, b)": ("3", "O += P V"),
        "between()": ("1", "S = Q K^T of the first"),
        "grad_v.issue(gemms.mma_pdo, w)": ("1", "S = Q K^T of the first"),
        "grad_q.issue(self.mma_dsk, x)": ("7", "dQ = dS K of a tile"),
        "self.mma_pv.add(y)": ("3", "O += P V"),
        "max": ("2", "softmax"),
        "self.mma_pv.wait()": ("3", "O += P V"),
        "behind()": ("kernel", "A toy"),
        "issue()": ("7", "dQ = dS K of a tile"),
        "matmul_qk.wait(mma_qk, 1)": ("1", "S = Q K^T of the first"),
        "self.other.issue(d)": ("helper", "Help, in one sentence"),
    }
    assert {text: named(toy, text) for text in expected} == expected
    assert steps.step_of(toy, 1) is None


def test_titles_are_what_all_places_begin_with() -> None:
    given = [
        Step("1", "S = Q K^T of the next tile", "f", 1),
        Step("1", "S = Q K^T of the first", "f", 5),
        Step("load", "Load.", "f", 2),
        Step("0", "begin", "f", 3),
    ]
    assert steps.titles(given) == {"0": "begin", "1": "S = Q K^T", "load": "Load."}
    assert list(steps.titles(given)) == ["0", "1", "load"]


@pytest.mark.parametrize(
    ("file", "numbers"),
    [
        ("sm80/forward", "01234"),
        ("sm90_forward/forward", "1234"),
        ("sm90_wide/forward", "1234"),
        ("sm90_wide/gradient", "123478"),
        ("sm80_split_d/forward", "01234"),
        ("decode/forward", "01234"),
        ("sm80/backward", "012345678"),
        ("sm90_backward/backward", "12345678"),
        ("sm80_split_d/backward", "012345678"),
    ],
)
def test_every_fused_kernel_numbers_its_steps(file: str, numbers: str) -> None:
    path = KERNELS / f"{file}.py"
    found = (steps.step_of(path, line) for line in range(1, len(path.read_text().splitlines()) + 1))
    assert {step.name for step in found if step and step.is_numbered} == set(numbers)


# listings

LINED = """.visible .entry toy_0(
)
{
\t.loc\t1 1000 0
\tmov.u32 \t%r1, %tid.x;
\t// begin inline asm
\t.loc\t1 1001 0
\twgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1;
\t// end inline asm
\t.loc\t2 7 0
\tadd.s32 \t%r2, %r1, 1;
\t.loc\t1 2000 0
\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r1}, %rd1;
\tret;
}
\t.file\t1 "somewhere/steps"
\t.file\t2 "elsewhere.py"
"""
PLAIN = "\n".join(line for line in LINED.splitlines() if ".loc" not in line and ".file" not in line)
ONE, TWO = Step("1", "S = Q K^T", "fused/toy.py", 10), Step("helper", "", "fused/toy.py", 20)


def toy_lined() -> line_info.LineInfo:
    return line_info.LineInfo(LINED, b"", (ONE, TWO))


def test_marks_precede_each_step_and_change_nothing_else() -> None:
    artifact = dataclasses.replace(fakes.artifact(parse_symbol("matmul_qk_sm90_bf16_d64", "sm_90a").build), ptx=PLAIN)
    marked = list(listing.marked(listing.ptx_lines(artifact, toy_lined())))
    marks = [line for line in marked if line.startswith("// ----")]
    assert marks == ["// ---- step 1  S = Q K^T  [fused/toy.py:10]", "// ---- helper  [fused/toy.py:20]"]
    assert "\n".join(line for line in marked if line not in marks) == PLAIN
    # Line numbers that LLVM increments within inline assembly belong to the same step; another file has no step.
    steps_of = {
        line.text.split()[0]: line.step for line in listing.ptx_lines(artifact, toy_lined()) if line.text.strip()
    }
    assert steps_of["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"] is TWO
    assert steps_of["add.s32"] is None


def test_products_without_lines_are_matched_by_shape_and_order(monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = fakes.artifact(parse_symbol("matmul_qk_sm90_bf16_d64", "sm_90a").build)
    artifact = dataclasses.replace(artifact, kernels=(dataclasses.replace(artifact.kernels[0], symbol="toy_0"),))

    def steps_with(*opcodes: str) -> list[Step | None]:
        items = [sass.Instruction("MOV", place=("steps", 2000)), *map(sass.Instruction, opcodes)]
        monkeypatch.setattr(sass, "disassemble", lambda _: {"toy_0": items})
        return [step for _, step in listing.sass_lines(artifact, toy_lined())["toy_0"]]

    assert steps_with("HGMMA.64x128x16.F32", "NOP", "HGMMA.64x64x16.F32") == [TWO, ONE, TWO, TWO]
    assert steps_with("HGMMA.64x64x16.F32", "HGMMA.64x128x16.F32") == [TWO, None, None]


def test_nvdisasm_json_becomes_instructions() -> None:
    items = [
        {"opcode": "MOV", "operands": "R1,R2", "source-file-id": 0, "source-line": 9},
        {"opcode": "BRA.U", "predicate": "@P0"},
    ]
    tables = {"directories": ["a/b"], "files": [{"dir-idx": 0, "file": "c.py"}]}
    functions = [{"function-name": "toy_0", "sass-instructions": items}]
    found = sass.read([{}, functions, tables])["toy_0"]
    assert found == [sass.Instruction("MOV", "R1,R2", "", ("a/b/c.py", 9)), sass.Instruction("BRA.U", "", "@P0")]
    assert [str(item) for item in found] == [f"{'':6s}{'MOV':32s}R1,R2", "@P0   BRA.U"]
    assert sass.groups(found) == {"moves": 1, "control": 1}
    without_lines = [{"function-name": "toy_0", "sass-instructions": items[1:]}]
    assert sass.read([{}, without_lines])["toy_0"] == found[1:]


def test_no_opcode_is_in_two_groups() -> None:
    counts = Counter(opcode for opcodes in sass.GROUPS.values() for opcode in opcodes)
    assert max(counts.values()) == 1


# occupancy and grids


def test_occupancy_names_the_limit() -> None:
    assert set(MULTIPROCESSORS) == {arch.compute_capability for arch in ARCHITECTURES.values()}
    found = occupancy("sm_90a", 512, 128, 199824)
    assert (found.blocks, found.warps, found.max_warps) == (1, 16, 64)
    assert found.limited_by == ("registers", "shared memory")
    assert occupancy("sm_90", 128, 26, 0).blocks == 16
    assert occupancy("sm_80", 32, 16, 0).limited_by == ("blocks",)
    assert occupancy("sm_80", 64, 16, 0).limited_by == ("warps", "blocks")
    assert occupancy("sm_86", 128, 32, 48 * 1024).limited_by == ("shared memory",)
    assert occupancy("sm_90", 128, 168, 0).blocks == 3
    # The driver's 1024 bytes count once, whether the cubin states them or not.
    assert occupancy("sm_90", 128, 32, 75 * 1024, 1024) == occupancy("sm_90", 128, 32, 75 * 1024)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_grid_rules_give_the_grids_of_plans(arch: str, direction: str) -> None:
    draw = random.Random(7)
    checked = 0
    for _ in range(60):
        group, heads = draw.choice((1, 2, 4)), draw.choice((1, 3))
        sizes = draw.randrange(1, 5), draw.choice((1, 70, 300)), draw.choice((1, 257, 2000)), heads * group
        shape = Shape(*sizes, draw.choice((32, 64, 128, 192, 320)), draw.choice((64, 128)), num_heads_key=heads)
        mask = draw.choice((masks.Full(), masks.Causal()))
        problem = Problem.dense(direction, shape, draw.choice(("bfloat16", "float16", "float32")), mask)
        for plan in plans(problem, arch):
            for launch in plan.launches:
                found = evaluated(launch_rules.grid(plan.build, launch.symbol), problem, plan)
                assert found == launch.grid, launch.symbol
                checked += 1
    assert checked > 60


def evaluated(rule: Grid, problem: Problem, plan: Any) -> tuple[int, ...]:
    names = launch_rules.values(problem, plan.build, plan.architecture.num_sms)
    return tuple(part.evaluate(names) for part in rule)


def test_grid_rule_of_a_bias_gradient_and_of_sinks() -> None:
    plan = parse_symbol("bwd_sm80_bf16_d64_full_bias_sinks_to_bs_sum_hq", "sm_80")
    rules = {role: launch_rules.grid(plan.build, symbol) for role, symbol in entry_points.entries(plan.build).items()}
    assert tuple(map(str, rules["bias"][1:])) == ("bias_heads", "bias_batch")
    assert tuple(map(str, rules["sinks"])) == ("num_heads", "1", "1")
    gemm = parse_symbol("grad_v_sm80_bf16_d64", "sm_80").build
    assert launch_rules.grid(gemm, f"{gemm.symbol}_0")[0] == Name("tiles")


# facts, differences, pictures and pages


def fake_subject(symbol: str, arch: str = "sm_90", **changes: Any) -> facts.InspectedKernel:
    plan = parse_symbol(symbol, arch)
    artifact = dataclasses.replace(fakes.artifact(plan.build), **changes)
    return facts.inspect_kernel(plan, artifact, with_steps=False)


def test_difference_of_a_kernel_with_itself_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "tool", lambda: None)
    found = facts.facts(fake_subject("bwd_sm80_bf16_d64_full"))
    assert difference(found, found) == {}


def test_difference_matches_entries_by_their_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "tool", lambda: None)
    left, right = (facts.facts(fake_subject(name)) for name in ("bwd_sm80_bf16_d64_full", "bwd_sm80_bf16_d128_full"))
    left["instructions"] = {f"{left['symbol']}_0": {"HMMA": 8}}
    right["instructions"] = {f"{right['symbol']}_0": {"HMMA": 24, "RED": 2}}
    left["steps"] = {f"{left['symbol']}_0": [{"step": "1", "groups": {"products": 8}}]}
    found = difference(left, right)
    assert {"what": "head_dim", "left": 64, "right": 128} in found["identity"]
    assert found["instructions"] == [
        {"what": "main: HMMA", "left": 8, "right": 24},
        {"what": "main: RED", "left": 0, "right": 2},
    ]
    assert found["steps"] == [{"what": "main: 1, products", "left": 8, "right": None}]
    assert "parameters" not in found
    assert any(row["what"] == "main: shared_memory_bytes" for row in found["resources"])
    assert {row["what"].partition(":")[0] for row in found["launches"]} <= {"main", "delta", "finish"}


def test_text_difference_ignores_the_numbers_of_registers() -> None:
    left = ["add.s32 %r1, %r2, %r3;", "bra $L__BB0_7;", "ret;"]
    assert not list(text_difference(left, ["add.s32 %r8, %r2, %r9;", "bra $L__BB0_12;", "ret;"], ("a", "b")))
    changed = list(text_difference(left, ["sub.s32 %r8, %r2, %r9;", *left[1:]], ("a", "b")))
    assert changed[:2] == ["--- a", "+++ b"]
    assert "-add.s32 %r, %r, %r;" in changed


def test_pictures_are_wellformed_and_show_every_buffer() -> None:
    build = parse_symbol("bwd_sm80_bf16_d128_causal", "sm_90").build
    rows = facts.shared_memory_rows(build)
    root = ElementTree.fromstring(drawing.shared_memory_svg(rows, ("load", "S"), "a < b"))
    shown = " ".join(root.itertext())
    assert all(buffer.name in shown for buffer in build.shared_memory)
    table = [{"step": "1", "title": "S = Q K^T & more", "instructions": 6, "groups": {"products": 4, "moves": 2}}]
    ElementTree.fromstring(drawing.steps_svg(table, ("products", "moves", "other"), "steps"))


def test_page_states_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setattr(sass, "tool", lambda: None)
    text = page.page(fake_subject("fwd_sm80_bf16_d64_full", ptx=".version 8.8\n// <b>\n"))
    assert "Steps are not marked:</b> not requested" in text
    assert "nvdisasm is not installed" in text
    assert "&lt;b&gt;" in text
    assert "<h1>fwd_sm80_bf16_d64_full_128x128</h1>" in text
    assert unbalanced(text) == []


def test_steps_of_another_compiler_s_artifact_are_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = parse_symbol("fwd_sm80_bf16_d64_full", "sm_90")
    artifact = dataclasses.replace(fakes.artifact(plan.build), allocation="another way")
    assert "none of this compiler's allocations" in facts.inspect_kernel(plan, artifact).unmarked


def test_code_of_no_cubin_is_refused() -> None:
    with pytest.raises(ValueError, match="not a cubin"):
        cubin.code(b"something else")


def test_unknown_names_are_refused() -> None:
    plan = plan_forward(Problem.dense("forward", Shape(1, 128, 128, 1, 64, 64), "float16"), "sm_90")
    with pytest.raises(StopIteration):
        launch_rules.grid(plan.build, "nothing_0")
    with pytest.raises(NotSupported):
        occupancy("sm_10", 32, 32, 0)
