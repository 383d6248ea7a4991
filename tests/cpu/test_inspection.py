"""Tests of inspection: steps and marks, occupancy, grids, differences and pages, on toys and on real kernels."""

from __future__ import annotations

import dataclasses
import operator
import random
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fakes
import pytest

from cutlass_py_attn import cubin, kernels, masks
from cutlass_py_attn.artifact import Artifact
from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.device import ARCHITECTURES
from cutlass_py_attn.errors import NotSupported, Stale
from cutlass_py_attn.grids import grid_rule
from cutlass_py_attn.inspection import drawing, facts, line_info, listing, page, sass, steps
from cutlass_py_attn.inspection.difference import difference, text_difference
from cutlass_py_attn.inspection.occupancy import MULTIPROCESSORS, occupancy
from cutlass_py_attn.inspection.steps import Step
from cutlass_py_attn.parts.integers import ceil_div
from cutlass_py_attn.planner import plan_forward, plans
from cutlass_py_attn.problem import Problem, Shape

FUSED = Path(steps.PACKAGE, "fused")
TOY = '''
class Toy:
    def kernel(self):
        """A toy."""
        ready()
        # 0  load
        load()
        for turn in turns:
            wait()
            # 1  S = Q K^T of the first, behind it 3  O += P V. The rest is prose
            self.scores.issue(a)
            self.output.issue(b)
            self.dv.add(w)
            between()
            # 2  softmax
            soft(
                max
            )
            self.output.wait()
        behind()

    def dq(self):
        """Who multiplies: 7  dQ = dS K of a tile. More."""
        issue()
        self.dq.add(x)

    def helper(self):
        """Help, in one sentence. And another."""
        self.scores.issue(c)
        self.other.issue(d)
        self.output.add(y)
'''


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    return path


def named(path: Path, text: str) -> tuple[str, str]:
    """(name, title) of the step of the only such line."""
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
        "self.scores.issue(a)": ("1", "S = Q K^T of the first"),
        "self.output.issue(b)": ("3", "O += P V"),
        "between()": ("1", "S = Q K^T of the first"),
        "self.dv.add(w)": ("1", "S = Q K^T of the first"),
        "self.dq.add(x)": ("7", "dQ = dS K of a tile"),
        "self.output.add(y)": ("3", "O += P V"),
        "max": ("2", "softmax"),
        "self.output.wait()": ("3", "O += P V"),
        "behind()": ("kernel", "A toy"),
        "issue()": ("7", "dQ = dS K of a tile"),
        "self.scores.issue(c)": ("1", "S = Q K^T of the first"),
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
        ("forward", "01234"),
        ("hopper_forward", "1234"),
        ("streamed_forward", "01234"),
        ("decode", "01234"),
        ("backward", "012345678"),
        ("hopper_backward", "12345678"),
        ("streamed_backward", "012345678"),
    ],
)
def test_every_fused_kernel_numbers_its_steps(file: str, numbers: str) -> None:
    path = FUSED / f"{file}.py"
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


def toy_lined() -> line_info.Lined:
    return line_info.Lined(LINED, b"", (ONE, TWO))


def test_marks_stand_before_each_step_and_change_nothing_else() -> None:
    artifact = dataclasses.replace(fakes.artifact(parse_symbol("matmul_qk_hopper_bf16_d64", "sm_90a").build), ptx=PLAIN)
    marked = list(listing.marked(listing.ptx_lines(artifact, toy_lined())))
    marks = [line for line in marked if line.startswith("// ----")]
    assert marks == ["// ---- step 1  S = Q K^T  [fused/toy.py:10]", "// ---- helper  [fused/toy.py:20]"]
    assert "\n".join(line for line in marked if line not in marks) == PLAIN
    # Lines that LLVM counts on inside inline assembly are still those of the step; a foreign file is of no step.
    steps_of = {
        line.text.split()[0]: line.step for line in listing.ptx_lines(artifact, toy_lined()) if line.text.strip()
    }
    assert steps_of["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"] is TWO
    assert steps_of["add.s32"] is None


def test_products_without_lines_are_matched_by_shape_and_order(monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = fakes.artifact(parse_symbol("matmul_qk_hopper_bf16_d64", "sm_90a").build)
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
    assert (found.blocks, found.warps, found.warps_allowed) == (1, 16, 64)
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
                assert evaluated(grid_rule(plan.build, launch.symbol), shape, plan) == launch.grid, launch.symbol
                checked += 1
    assert checked > 60


def evaluated(rule: tuple[str, str, str], shape: Shape, plan: Any) -> tuple[int, ...]:
    names = {item.name: getattr(shape, item.name) for item in dataclasses.fields(shape)}
    names |= {"num_heads_key": shape.num_heads_key, "group": shape.group, "num_sms": plan.architecture.num_sms}
    names |= {"num_splits_key": plan.num_splits_key, "ceil_div": ceil_div, "min": min, "max": max}
    names["div"] = operator.floordiv
    return tuple(eval(part, {"__builtins__": {}}, names) for part in rule)


def test_grid_rule_of_a_bias_gradient_and_of_sinks() -> None:
    plan = parse_symbol("bwd_generic_bf16_d64_full_bias_sinks_to_bs_sum_hq", "sm_80")
    rules = {role: grid_rule(plan.build, symbol) for role, symbol in kernels.entries(plan.build).items()}
    assert rules["bias"][1:] == ("bias_heads", "bias_batch")
    assert rules["sinks"] == ("num_heads", "1", "1")
    assert grid_rule(parse_symbol("grad_v_generic_bf16_d64", "sm_80").build, "grad_v_generic_bf16_d64_0")[0] == "tiles"


# facts, differences, pictures and pages


def fake_subject(symbol: str, arch: str = "sm_90", **changes: Any) -> facts.Subject:
    plan = parse_symbol(symbol, arch)
    artifact = dataclasses.replace(fakes.artifact(plan.build), **changes)
    return facts.subject(plan, artifact, with_steps=False)


def test_difference_of_a_kernel_with_itself_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "tool", lambda: None)
    found = facts.facts(fake_subject("bwd_generic_bf16_d64_full"))
    assert difference(found, found) == {}


def test_difference_matches_entries_by_their_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "tool", lambda: None)
    left, right = (
        facts.facts(fake_subject(name)) for name in ("bwd_generic_bf16_d64_full", "bwd_generic_bf16_d128_full")
    )
    left["instructions"] = {"bwd_generic_bf16_d64_full_0": {"HMMA": 8}}
    right["instructions"] = {"bwd_generic_bf16_d128_full_0": {"HMMA": 24, "RED": 2}}
    left["steps"] = {"bwd_generic_bf16_d64_full_0": [{"step": "1", "groups": {"products": 8}}]}
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
    build = parse_symbol("bwd_generic_bf16_d128_causal", "sm_90").build
    rows = facts.shared_memory_rows(build)
    root = ElementTree.fromstring(drawing.shared_memory_svg(rows, ("load", "S"), "a < b"))
    shown = " ".join(root.itertext())
    assert all(buffer.name in shown for buffer in build.shared_memory)
    table = [{"step": "1", "title": "S = Q K^T & more", "instructions": 6, "groups": {"products": 4, "moves": 2}}]
    ElementTree.fromstring(drawing.steps_svg(table, ("products", "moves", "other"), "steps"))


class Balance(HTMLParser):
    """Open tags that are not closed in their order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.crossed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "rect", "line", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Such a tag has no end to wait for."""

    def handle_endtag(self, tag: str) -> None:
        if tag == "rect":  # with a hint in it
            return
        if not self.open or self.open.pop() != tag:
            self.crossed.append(tag)


def test_page_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jinja2")
    monkeypatch.setattr(sass, "tool", lambda: None)
    text = page.page(fake_subject("fwd_generic_bf16_d64_full", ptx=".version 8.8\n// <b>\n"))
    assert "Steps are not marked:</b> not asked for" in text
    assert "it needs nvdisasm" in text
    assert "&lt;b&gt;" in text
    assert "<h1>fwd_generic_bf16_d64_full</h1>" in text
    assert (Balance(text).open, Balance(text).crossed) == ([], [])


def test_steps_of_a_foreign_artifact_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = parse_symbol("fwd_generic_bf16_d64_full", "sm_90")
    artifact = dataclasses.replace(fakes.artifact(plan.build), allocation="another way")
    assert "none of this compiler's allocations" in facts.subject(plan, artifact).unmarked


# real kernels


def compiled(symbol: str, arch: str) -> tuple[facts.Subject, Artifact]:
    pytest.importorskip("cutlass")
    from cutlass_py_attn.compiler import artifact_for

    plan = parse_symbol(symbol, arch)
    artifact = artifact_for(plan.build)
    return facts.subject(plan, artifact), artifact


# Instructions of the products of each step: rows x columns x depth of the tile over what one instruction has of it.
PRODUCTS = {
    ("fwd_generic_f16_d64_full", "sm_90"): {"1": "mma", "3": "mma"},
    ("bwd_hopper_bf16_d64_causal", "sm_90a"): {"1": 8, "3": 4, "5": 8, "6": 8, "7": 16},
}


@pytest.mark.parametrize(("symbol", "arch"), PRODUCTS)
def test_steps_of_a_compiled_kernel(symbol: str, arch: str) -> None:
    if sass.tool() is None:
        pytest.skip("nvdisasm is not installed")
    found, artifact = compiled(symbol, arch)
    assert found.unmarked == ""
    assert found.lined is not None
    # The marks are all that the lines add; machine code is the same byte for byte.
    unmarked = [line for line in found.marked_ptx() if not line.startswith("// ---- ")]
    assert unmarked == artifact.ptx.splitlines()
    assert cubin.code(found.lined.cubin) == cubin.code(artifact.cubin)
    rows = {row["step"]: row for row in facts.facts(found)["steps"][f"{symbol}_0"]}
    products = {step: row["groups"]["products"] for step, row in rows.items() if row["groups"].get("products")}
    in_ptx = Counter(
        step.name for text, step in found.lined.labels() if step and re.match(r"\s*(wgmma\.mma_async|mma\.sync)", text)
    )
    assert products == in_ptx
    assert set(products) == set(PRODUCTS[symbol, arch])
    numbers = {step: count for step, count in PRODUCTS[symbol, arch].items() if isinstance(count, int)}
    assert {step: products[step] for step in numbers} == numbers
    assert rows["2"]["groups"]["MUFU"] >= 64  # the exponentials
    text = page.page(found)
    assert (Balance(text).open, Balance(text).crossed) == ([], [])
    assert text.count('class="mark">step 2  ') >= 2  # in the PTX and in the SASS


def test_code_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="not a cubin"):
        cubin.code(b"something else")


def test_other_source_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    _, artifact = compiled("matmul_qk_generic_bf16_d64", "sm_90")
    other = dataclasses.replace(artifact, ptx=artifact.ptx.replace("add.", "sub.", 1))
    with pytest.raises(Stale, match="give other PTX than the artifact has"):
        line_info.lined(other)


def test_unknown_names_are_refused() -> None:
    plan = plan_forward(Problem.dense("forward", Shape(1, 128, 128, 1, 64, 64), "float16"), "sm_90")
    with pytest.raises(StopIteration):
        grid_rule(plan.build, "nothing_0")
    with pytest.raises(NotSupported):
        occupancy("sm_10", 32, 32, 0)
