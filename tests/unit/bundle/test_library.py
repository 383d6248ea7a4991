"""Tests of C libraries as files: what an export of many problems writes, refuses and gives back."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cutlass_py_attn import export_bundle, export_library, load_bundle
from cutlass_py_attn.bundle import interface, library, row_spec
from cutlass_py_attn.bundle.dispatch import ALWAYS, facts_of, order_key, preferred_when
from cutlass_py_attn.bundle.files import MANIFEST, Bundle
from cutlass_py_attn.bundle.manifest import Target, manifest, names_of, sealed
from cutlass_py_attn.bundle.names import name_refusals
from cutlass_py_attn.bundle.rules import AnyProblem, rules_of
from cutlass_py_attn.cli import artifacts
from cutlass_py_attn.cli.group import group
from cutlass_py_attn.errors import NotSupported, Stale
from cutlass_py_attn.kernels.sm90_family import choice as sm90_choice
from cutlass_py_attn.kernels.sm90_family.row import NEVER
from cutlass_py_attn.kernels.sm90_family.tiles import sm90_tiles as tiles_of
from cutlass_py_attn.launch.variants import MULTICAST, QUERY_HEADS
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.builder import build_for
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.tensors import DIRECTIONS, Shape, Tensor
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.term import ScoreTerm, StructFields, VectorOperand
from tests.support import fakes
from tests.support.bundles import CASE, problem_of, snapshot
from tests.support.c_compiler import compiler
from tests.support.fake_driver import FakeDriver
from tests.support.refusals import expect_raised

DECODE = "bf16_d64_q1_s8192_b4_h32k8_full"
MORE_ROWS = "bf16_d64_q4_s8192_b4_h32k4_full"
PREFILL = "bf16_d64_s500_b2_h8k2_full"


def exported(folder: Path, *problems: AnyProblem, archs: tuple[str, ...] = ("sm_90a",), **options: Any) -> Bundle:
    return export_library(folder, problems, archs, **{"kernels": fakes.artifact, **options})


def of_cases() -> tuple[Problem, ...]:
    decodes = (problem_of("forward", case) for case in (PREFILL, MORE_ROWS, DECODE))
    return *(problem_of(direction) for direction in DIRECTIONS), *decodes


def table(text: str, name: str) -> list[list[str]]:
    """The rows of a table in the C source."""
    (body,) = re.findall(rf"{name}\[\] = {{\n(.*?)\n}};", text, re.DOTALL)
    return [re.findall(r'"[^"]*"|[\w.]+', row) for row in body.replace("},\n", "}\n").split("}\n") if row.strip()]


# What is written


def test_files_of_a_library(tmp_path: Path) -> None:
    bundle = exported(tmp_path / "library", *of_cases())
    found = snapshot(bundle.path)
    sources = {name for name in found if not name.startswith("sm_")}
    assert sources == {
        "attention.c", "attention.h", "attention.images", "attention.pc.in", "CMakeLists.txt", MANIFEST,
        "rust/Cargo.toml", "rust/build.rs", "rust/src/lib.rs",
    }  # fmt: skip
    assert len(found) - len(sources) == 3 * 8
    assert {*bundle.manifest["files"]} == {*found} - {MANIFEST}
    assert [item["direction"] for item in bundle.manifest["problems"]] == ["forward"] * 4 + ["backward"]
    assert load_bundle(bundle.path).problems == bundle.problems


def test_exports_are_the_same_in_every_byte(tmp_path: Path) -> None:
    one, other = (snapshot(exported(tmp_path / name, *of_cases()).path) for name in ("a", "b"))
    assert one == other


def test_sources_follow_from_the_manifest_and_the_cubins(tmp_path: Path) -> None:
    bundle = exported(tmp_path / "library", *of_cases())
    written = snapshot(bundle.path)
    found = library.render(bundle.manifest, written)
    assert found == {name: written[name] for name in found}


def test_an_export_replaces_a_bundle_and_is_replaced_by_one(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    first = export_bundle(folder, [problem_of("forward")], ["sm_90a"], kernels=fakes.artifact)
    header = {*snapshot(first.path)}
    exported(folder, *of_cases())
    assert (folder / "attention.c").is_file()
    export_bundle(folder, [problem_of("forward")], ["sm_90a"], kernels=fakes.artifact)
    assert {*snapshot(folder)} == header
    assert not (folder / "rust").exists()


def test_problems_of_the_same_kernels_are_one(tmp_path: Path) -> None:
    """The first one stays. What a call fixes besides the machine code keeps problems apart: splits of the keys."""
    same = problem_of("forward"), problem_of("forward", CASE.replace("s200", "s777"))
    bundle = exported(tmp_path / "same", *same)
    assert bundle.problems == same[:1]
    backward = problem_of("backward", CASE + "_splits1")
    other = problem_of("backward", CASE + "_splits2")
    apart = exported(tmp_path / "apart", backward, other)
    assert apart.problems == (backward, other)
    assert len({plan.build for plan in apart.plans("backward")}) == 1
    text = (apart.path / "attention.c").read_text()
    assert len(table(text, "attention_images")) == 1, "the machine code is there once"
    assert len(table(text, "attention_kernels")) == 2


def test_seed_and_offset_may_be_on_the_device_in_any_call(tmp_path: Path) -> None:
    problem = problem_of("forward", CASE + "_dropout0.5").replace(philox_on_device=True)
    bundle = exported(tmp_path / "library", problem)
    assert bundle.problems == (problem.replace(philox_on_device=False),)
    text = (bundle.path / "attention.c").read_text()
    for name in ("philox_seed", "philox_offset"):
        assert f"(int64_t)(int64_t)c->call.{name}); /* {name} */" in text or f"c->call.{name}); /* {name} */" in text
        assert f"c->call.{name}_address); /* {name}_address */" in text


def test_order_of_the_kernels(tmp_path: Path) -> None:
    """Decode kernels for their rows, then for any; sm90; sm80 last. An sm80 kernel for the newest target first."""
    bundle = exported(tmp_path / "library", *of_cases(), archs=("sm_80", "sm_86", "sm_90a"))
    text = (bundle.path / "attention.c").read_text()
    kernels = [(row[0].strip('"'), row[1].strip('"')) for row in table(text, "attention_kernels")]
    order = [(*kernels[int(number)], int(preferred)) for number, preferred in table(text, "attention_order")]
    families = [symbol.split("_")[1] for symbol, _, _ in order]
    assert families == sorted(families, key=("decode", "sm90", "sm80").index)
    decodes = [(symbol, arch, preferred) for symbol, arch, preferred in order if "decode" in symbol]
    assert decodes[: len(decodes) // 2] == [(symbol, arch, 1) for symbol, arch, _ in decodes[: len(decodes) // 2]]
    assert [each[2] for each in decodes[len(decodes) // 2 :]] == [0] * (len(decodes) // 2)
    archs = [arch for symbol, arch, _ in order if symbol.startswith("fwd_sm80_bf16_d64_causal")]
    assert archs == ["sm_86", "sm_80"]


def test_rules_of_decode_kernels_for_few_and_for_many_sequences() -> None:
    """The rules change where the planner's tile of a cache in pages does: at 128 key heads of all sequences."""
    problems = {
        batch: problem_of("forward", f"bf16_d128_q1_s8192_b{batch}_h32k8_full_paged16") for batch in (1, 15, 16, 17, 64)
    }
    chosen = {batch: planner.builds(problem, "sm_90")[0] for batch, problem in problems.items()}
    assert chosen[1] == chosen[16] != chosen[17] == chosen[64]
    for build in {chosen[1], chosen[64]}:
        for batch, of_batch in chosen.items():
            names = {"num_queries": 1, "group": 4, "num_heads_key": 8, "batch": batch}
            assert preferred_when(build).evaluate(names) == (build == of_batch), batch


def test_rules_of_decode_kernels_for_their_rows() -> None:
    for case, rows in ((DECODE, (1, 16)), (MORE_ROWS, (17, 32))):
        build = planner.builds(problem_of("forward", case), "sm_90")[0]
        rule = preferred_when(build)
        taken = [
            count for count in range(1, 65)
            if rule.evaluate({"num_queries": count, "group": 1})
        ]  # fmt: skip
        assert (taken[0], taken[-1]) == rows
    wide = planner.builds(problem_of("forward", DECODE.replace("d64", "d256")), "sm_90")[0]
    assert preferred_when(wide) == ALWAYS, "the tile table has one tile for any number of rows"
    fallback = planner.builds(problem_of("forward", DECODE), "sm_90")[1]
    assert (fallback.family, preferred_when(fallback)) == ("decode", NEVER)
    of_any_length = planner.plans(problem_of("forward"), "sm_90a", any_length=True)[0].build
    assert preferred_when(of_any_length) == ALWAYS


def test_wide_loads_are_tried_before_narrow_ones() -> None:
    problem = problem_of("forward", "bf16_d64_s200_b2_h3_full")
    narrow = problem.replace(query=Tensor(problem.query.shape, problem.query.strides, "bfloat16", 8))
    one, other = (planner.builds(each, "sm_80")[0] for each in (problem, narrow))
    assert (one.vector_bytes, other.vector_bytes) == (16, 8)
    assert order_key(one) < order_key(other)
    assert facts_of(problem, one) == facts_of(narrow, other)


def test_full_axes_of_grad_bias_are_bits() -> None:
    problem = problem_of("backward")
    facts = facts_of(problem, planner.builds(problem, "sm_80")[0])
    assert library._numbers(facts)[-1] == 0
    assert library._numbers(dataclasses.replace(facts, grad_bias_axes=(True, False, True, True)))[-1] == 1 + 4 + 8


# What a library gives back


def test_kernels_and_problems_of_a_library(tmp_path: Path, driver_log: FakeDriver) -> None:
    bundle = exported(tmp_path / "library", *of_cases())
    assert bundle.directions == DIRECTIONS
    assert bundle.problem("backward") == problem_of("backward")
    with pytest.raises(NotSupported, match=r"direction = 'forward' .* has 4 such problems; see `problems`"):
        bundle.problem("forward")
    with pytest.raises(NotSupported, match="has 4 such problems"):
        bundle.bind("forward")
    for case, family in ((DECODE, "decode"), (PREFILL, "sm90"), (DECODE.replace("s8192", "s100"), "sm90")):
        assert bundle.bind("forward", problem_of("forward", case)).plan.build.family == family
    with pytest.raises(Stale, match="this forward problem needs other kernels"):
        bundle.bind("forward", problem_of("forward", PREFILL.replace("full", "full_sinks")))


# What is refused


class Distance(ScoreTerm):
    """A registered term."""

    name = "distance"
    vector = VectorOperand("distance", (("num_heads",),), "weight of the distance")
    struct = StructFields(addresses=("distance",))


def test_registered_terms_are_refused(tmp_path: Path) -> None:
    registry.register(Distance())
    try:
        problem = problem_of("forward").replace(score_terms=(("distance", Tensor((3,), (1,), "float32")),))
        with pytest.raises(NotSupported, match=r"score_terms = 'distance' .*: must be built-in terms, "):
            exported(tmp_path / "library", problem)
    finally:
        registry.unregister("distance")
    assert not (tmp_path / "library").exists()


@pytest.mark.parametrize("case", ["e4m3_d64_s200_b2_h4k2_causal", "bf16_d64_q1_s300_b2_h4k2_full_paged16_kv8"])
def test_scales_are_those_of_each_call(tmp_path: Path, case: str) -> None:
    """A kernel is exported once, whichever scales the problems have; the manifest has the first problem."""
    problems = tuple(problem_of("forward", f"{case}{grain}") for grain in ("_descaletensor", "", "_descalebatch"))
    bundle = exported(tmp_path / "library", *problems)
    assert bundle.problems == problems[:1]
    text = (bundle.path / "attention.c").read_text()
    for name in ("key_scale", "value_scale"):
        assert f"(int64_t)c->call.{name}.address); /* {name} */" in text
        for axis in ("batch", "head"):
            assert f"c->call.{name}.{axis}); /* {name}_{axis} */" in text
        assert f"/* {name}_row */" not in text


@pytest.mark.parametrize(("pages", "first"), [("", "batch"), ("_paged64", "page")])
def test_codes_of_a_latent_cache_have_three_arrays(tmp_path: Path, pages: str, first: str) -> None:
    """Each with strides of its own; value has none of its own, nor scales."""
    problem = problem_of("forward", f"bf16_d576v512_q1_s64_b2_h16k1_full{pages}_mla_kv8_descaletile")
    bundle = exported(tmp_path / "library", problem, archs=("sm_90a",))
    assert bundle.problems == (problem,)
    text = (bundle.path / "attention.c").read_text()
    for name in ("key", "key_scale", "key_rope"):
        assert f"(int64_t)c->call.{name}.address); /* {name} */" in text
        assert f"c->call.{name}.batch); /* {name}_{first} */" in text
        for axis in ("row", "head"):
            assert f"c->call.{name}.{axis}); /* {name}_{axis} */" in text
    assert "c->call.key_scale_tile); /* key_scale_tile */" in text
    assert "/* value_scale */" not in text
    pointers = bundle.manifest["problems"][0]["pointers"]
    rows = pointers["key"]["shape"][:3]
    assert {name: (each["dtype"], each["shape"]) for name, each in pointers.items() if name.startswith("key")} == {
        "key": ("float8_e4m3fn", [*rows, "512"]),
        "key_scale": ("float32", [*rows, "4"]),
        "key_rope": ("bfloat16", [*rows, "64"]),
    }
    assert pointers["key_scale"]["strides"] == [f"key_scale_{axis}" for axis in (first, "row", "head", "tile")]


def test_codes_of_a_latent_cache_are_for_sm_90a_alone(tmp_path: Path) -> None:
    problem = problem_of("forward", "bf16_d576v512_q1_s64_b2_h16k1_full_mla_kv8_descaletile")
    with pytest.raises(NotSupported, match="takes no targets without wgmma; use a cache of 16 bits"):
        exported(tmp_path / "library", problem, archs=("sm_86",))
    assert not (tmp_path / "library").exists()


@pytest.mark.parametrize(("is_sum", "variant"), [(False, "last"), (True, "sum_last")])
def test_float32_totals_are_refused(tmp_path: Path, is_sum: bool, variant: str) -> None:
    problem = MergeProblem.into_total((1, 50, 4, 128), "bfloat16", is_sum, True)
    with pytest.raises(NotSupported, match=rf"variant of a merge = '{variant}' .*: .* outputs of one dtype, .*; pass"):
        exported(tmp_path / "library", problem)
    assert not (tmp_path / "library").exists()


def test_every_objection_at_once(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    expect_raised(
        lambda: export_library(tmp_path, (), ("sm_10",), name="Attention", kernels=fakes.artifact),
        [
            "problems: a forward, a backward",
            "name: lower-case letters",
            "folder: holds notes.txt",
            "arch: one of sm_80",
        ],
    )
    with pytest.raises(NotSupported, match=r"problems = 'x' \(str\): must be a list of Problems"):
        export_library(tmp_path, "x", ("sm_80",))  # type: ignore[arg-type]
    assert snapshot(tmp_path) == {"notes.txt": b"mine"}


TAKEN_NAMES = {
    "string": "a header that C programs include",
    "features": "a header that C programs include",
    "cuda": "a header that C programs include",
    "errno": "a header that C programs include",
    "m": "a library of the system or of CUDA",
    "int": "a keyword of C or C\\+\\+, or a macro",
    "linux": "a keyword of C or C\\+\\+, or a macro",
    "class": "a keyword of C or C\\+\\+, or a macro",
    "crate": "a keyword of Rust",
    "for": "a keyword of C .*, nor of a keyword of Rust|a keyword of C",
    "test": "a keyword of Rust, or a name that cargo keeps",
    "edit_cache": "a target of CMake",
    "con": "a device on Windows",
}


@pytest.mark.parametrize("name", TAKEN_NAMES)
def test_names_that_cannot_be_built_are_refused(tmp_path: Path, name: str) -> None:
    """A file string.h would hide the header that attention.c includes; CMake has a target test."""
    with pytest.raises(NotSupported, match=rf"name = '{name}' .*: must not be that of .*{TAKEN_NAMES[name]}.*; choose"):
        exported(tmp_path / "library", problem_of("forward"), name=name)
    with pytest.raises(NotSupported, match=r"must have at most 64 characters, .*; shorten it"):
        exported(tmp_path / "library", problem_of("forward"), name="x" * 65)
    assert not list(tmp_path.iterdir())
    assert list(name_refusals(f"my_{name}")) == list(name_refusals("x" * 64)) == []


def test_every_header_that_programs_include_is_refused() -> None:
    """What the C compiler reads for the standard headers, directly in one of its folders."""
    standard = [
        "assert",
        "complex",
        "ctype",
        "errno",
        "fenv",
        "float",
        "inttypes",
        "iso646",
        "limits",
        "locale",
        "math",
        "setjmp",
        "signal",
        "stdalign",
        "stdarg",
        "stdatomic",
        "stdbool",
        "stddef",
        "stdint",
        "stdio",
        "stdlib",
        "stdnoreturn",
        "string",
        "tgmath",
        "time",
        "wchar",
        "wctype",
        "unistd",
        "dlfcn",
        "pthread",
        "sys/stat",
        "sys/socket",
        "netdb",
        "poll",
        "semaphore",
        "fcntl",
        "dirent",
    ]
    source = "#define _GNU_SOURCE\n" + "".join(f"#include <{name}.h>\n" for name in standard)
    command = [compiler("c"), "-M", "-x", "c", "-"]
    read = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    paths = [Path(word) for word in read.replace("\\\n", " ").split()[1:] if word.endswith(".h")]
    names = {path.stem for path in paths if path.parent.name == "include"}
    assert names >= {"errno", "features", "stdio", "stddef"}
    assert [name for name in sorted(names) if not name.startswith("_") and not [*name_refusals(name)]] == []


def test_a_header_of_several_problems_names_the_library(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match=r"problems = \['forward', 'forward'\] .*export_library \(--library\)"):
        export_bundle(tmp_path / "b", [problem_of("forward"), problem_of("forward", PREFILL)], ["sm_90a"])


def test_without_jinja2_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(NotSupported, match=r"the C library needs jinja2: pip install"):
        exported(tmp_path / "library", problem_of("forward"))
    assert list(tmp_path.iterdir()) == []


def test_hostile_texts_stay_in_comments_and_strings() -> None:
    """Of an artifact, whose toolchain is in the first comment of each file."""
    problem = problem_of("forward")
    plan = planner.plan(problem, "sm_80")
    hostile = '*/\n#error "from elsewhere"\n/* \\\n ??/ " \u2028 \u202e'
    target = Target(problem, plan, dataclasses.replace(fakes.artifact(plan.build), toolchain=hostile), 108)
    files = target.artifact.files()
    found = library.render(manifest("attention", (target,), files), files)
    for name in ("attention.c", "attention.h", "rust/src/lib.rs", "CMakeLists.txt"):
        where = [line for line in found[name].decode().splitlines() if "from elsewhere" in line]
        assert len(where) == 1
        assert where[0].isascii()
        assert re.match(r" {3}Written by|//! Written|# package", where[0])


# The interface


def test_every_input_of_a_kernel_is_a_field_of_the_call(tmp_path: Path) -> None:
    """Of every feature, in both directions; a new term must be added to the struct's end."""
    everything = "bf16_d128_s700_t5000_h4k2_causal_window64_biasgrad_dropout0.1_softcap30_alibib_sinks_deterministic"
    for direction in DIRECTIONS:
        exported(tmp_path / direction, problem_of(direction, everything))
    with pytest.raises(
        KeyError, match="distance: the call of the library has no such field; add it to the end of CALL"
    ):
        interface.field("distance")


def test_the_first_version_of_the_call_is_kept() -> None:
    """Fields may only be added behind these: programs are compiled with them."""
    names = [field.name for field in interface.CALL]
    assert names[:8] == ["bytes", "abi", "direction", "dtype", "head_dim", "head_dim_value", "flags", "gradients"]
    sizes = {"u32": 4, "i32": 4, "u64": 8, "i64": 8, "f64": 8, "array": 32, "bias": 40}
    first = 0
    for field in interface.CALL:
        first += sizes[field.kind]
        if field.name == "grad_sinks":
            break
    assert first == interface.FIRST_BYTES
    assert [word for word, _ in interface.STATUSES][:7] == [
        "OK", "INVALID", "NO_KERNEL", "NO_DRIVER", "DRIVER", "WORKSPACE", "WRONG_ABI",
    ]  # fmt: skip


# The command


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "compiler", lambda: lambda build: (fakes.artifact(build), "0.5 s"))


@pytest.mark.usefixtures("no_compiler")
def test_command_exports_a_library(tmp_path: Path) -> None:
    named = [option for case in (CASE, DECODE, PREFILL) for option in ("--problem", case)]
    folder = tmp_path / "library"
    done = CliRunner().invoke(
        group, ["export", "--library", "--name", "ours", *named, "--arch", "sm_80,sm_90a", "-o", str(folder)]
    )
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert len(lines) == 2 * 7  # CASE and PREFILL in both directions; forwards and the backward of CASE with two tiles
    assert lines[-1].startswith(f"{len(snapshot(folder))} files, ")
    assert "ours_launch(" in (folder / "ours.h").read_text()
    assert json.loads((folder / MANIFEST).read_text())["name"] == "ours"
    done = CliRunner().invoke(group, ["export", *named, "--arch", "sm_80", "-o", str(tmp_path / "b")])
    assert done.exit_code == 1
    assert "export a library with export_library (--library)" in done.output


@pytest.mark.usefixtures("no_compiler")
def test_command_exports_appends_and_merges(tmp_path: Path) -> None:
    """Beside attention; with one word each, which a bundle of one problem refuses."""
    words = (
        "append_bf16_d128", "append_f16_d64v32_e4m3", "append_f32_d96_e4m3_row", "append_bf16_d512v64_e4m3_tile",
        "merge_bf16_d128_varlen",
    )  # fmt: skip
    named = [option for word in (*words, DECODE) for option in ("--problem", word)]
    folder = tmp_path / "library"
    done = CliRunner().invoke(group, ["export", "--library", *named, "--arch", "sm_90a", "-o", str(folder)])
    assert done.exit_code == 0, done.output
    assert [line.partition(";")[0] for line in done.output.splitlines()[1:-1]] == [
        "append for sm_90: append_sm80_bf16_d128_8x16",
        "append for sm_90: append_sm80_f16_d64v32_e4m3_16x8",
        "append for sm_90: append_sm80_f32_d96_e4m3_row_4x32",
        "append for sm_90: append_sm80_bf16_d512v64_e4m3_tile_4x32",
        "merge for sm_90: merge_sm80_bf16_d128_varlen_8x16",
    ]
    bundle = load_bundle(folder)
    assert bundle.directions == ("forward", "append", "merge")
    assert bundle.problems[1:] == tuple(map(row_spec.parse, words))
    for wrong, says in (
        ("append_d128", "write it like append_bf16_d128 or merge_f16_d64_varlen"),
        ("merge_bf16_d0", "head_dim_value = 0 (int): must be from 1 to 1024"),
    ):
        options = ["export", "--library", "--problem", wrong, "--arch", "sm_90", "-o", str(tmp_path / "wrong")]
        done = CliRunner().invoke(group, options)
        assert (done.exit_code, says in done.output) == (1, True), done.output
    done = CliRunner().invoke(group, ["export", "--problem", words[0], "--arch", "sm_90", "-o", str(tmp_path / "b")])
    assert done.exit_code == 1
    assert "problems = 'AppendProblem' (str): must be Problems; export a library" in done.output


@pytest.mark.parametrize("word", ["append_bf16_d128_e4m3_row", "merge_bf16_d128"])
def test_rules_of_rows_are_the_plan(tmp_path: Path, word: str) -> None:
    """Struct, grid and conditions, each a number of the plan; a manifest of other numbers is damaged."""
    problem = row_spec.parse(word)
    bundle = exported(tmp_path / "library", problem, archs=("sm_90",))
    (item,) = bundle.manifest["problems"]
    (target,) = item["targets"]
    (plan,) = bundle.plans(item["direction"])
    values = {field["name"]: field["value"] for field in target["struct"]["fields"] if "value" in field}
    assert values == {**dict.fromkeys(values, 0), **dict(plan.params)}, "0: an address that the problem does not have"
    assert target["launches"][0]["grid"] == list(plan.launches[0].grid) == [1, 1, 1]
    assert (target["workspace"]["bytes"], target["preferred_when"]) == (0, str(ALWAYS))
    assert {*item["pointers"]} == {field["pointer"] for field in target["struct"]["fields"] if "pointer" in field}
    path = bundle.path / MANIFEST
    changed = json.loads(path.read_text())
    changed["problems"][0]["problem"] = {"key": 1}
    path.write_text(json.dumps(sealed(changed)))
    with pytest.raises(Stale, match="damaged or from another version"):
        load_bundle(bundle.path)


@pytest.mark.parametrize("case", ["bf16_d128_s8192_b1_h4k2_causal", "bf16_d128_s300_t5000_h4k2_causal"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_variants_are_preferred_where_the_planner_prefers_them(case: str, direction: str) -> None:
    """The rules of kernels for long and for short sequences are those of the planner, at the limits of each."""
    exported_problem = problem_of(direction, case)
    tiles = [tile for tile in tiles_of(exported_problem) if tile.variant in (MULTICAST, QUERY_HEADS)]
    checked = set()
    for tile in tiles:
        build, found = build_for(exported_problem, "sm_90a", tile, "sm90")
        if found:
            continue  # the variant does not take the problem
        for length in (64, 640, 1279, 1280, 1281, 4095, 4096, 9000):
            for batch, num_sms in ((1, 132), (2, 132), (3, 16)):
                shape = exported_problem.shape
                tokens = None if shape.tokens is None else (length * batch, length * batch - 7 * (batch > 1))
                lengths = Shape(batch, length, length, 4, 128, 128, 2, tokens)
                problem = Problem.dense(direction, lengths, "bfloat16", exported_problem.mask)
                names = names_of(rules_of(problem, build), num_sms)
                rule = preferred_when(build).evaluate(names)
                assert bool(rule) == sm90_choice.applies(problem, tile, num_sms), (tile.variant, length, batch)
                checked.add((tile.variant, bool(rule)))
    wanted = {"forward": MULTICAST, "backward": QUERY_HEADS}[direction]
    has_variant = direction == "backward" or exported_problem.sequences is None
    assert checked == ({(wanted, True), (wanted, False)} if has_variant else set())
