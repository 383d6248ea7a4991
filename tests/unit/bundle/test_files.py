"""Tests of bundles as files: what is written, what is refused, and that it loads where no compiler is."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import pytest
from click.testing import CliRunner, Result

from cutlass_py_attn import export_bundle, load_bundle
from cutlass_py_attn.api.attention import attention_forward
from cutlass_py_attn.artifact import Artifact, Folder
from cutlass_py_attn.bundle import header, numbers
from cutlass_py_attn.bundle.files import MANIFEST
from cutlass_py_attn.bundle.manifest import SEAL, sealed, sha256
from cutlass_py_attn.cli import artifacts
from cutlass_py_attn.cli.group import group
from cutlass_py_attn.errors import AttentionError, CompileError, NotSupported, Stale
from cutlass_py_attn.kernels.catalogue import kernel_of
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.expressions import FUNCTIONS
from cutlass_py_attn.launch.names import NUM_QUERIES
from cutlass_py_attn.plan import launch_rules
from cutlass_py_attn.problem.masks import Causal
from cutlass_py_attn.problem.serialize import to_json
from cutlass_py_attn.problem.tensors import DIRECTIONS
from cutlass_py_attn.runtime import driver
from tests.support import crafted_json, fakes
from tests.support.bundles import CASE, export, problem_of, snapshot
from tests.support.fake_driver import FakeDriver
from tests.support.fakes import addresses, aligned
from tests.support.refusals import expect_raised

ROOT = Path(__file__).resolve().parents[3]

# What is written


def test_files_of_a_bundle(tmp_path: Path) -> None:
    bundle = export(tmp_path / "new" / "made" / "bundle", archs=("sm_80", "sm_90a"))
    stems = [
        "sm_80/bwd_sm80_bf16_d64_causal_128x128", "sm_80/fwd_sm80_bf16_d64_causal_128x128",
        "sm_90a/bwd_sm90_bf16_d64_causal_key_registers_128x128", "sm_90a/fwd_sm90_bf16_d64_causal_192x128",
    ]  # fmt: skip
    kinds = ("cubin", "json", "ptx")
    expected = {"attention.h", MANIFEST, *(f"{stem}.{kind}" for stem in stems for kind in kinds)}
    found = snapshot(bundle.path)
    assert found.keys() == expected
    assert bundle.manifest["files"] == {
        name: {"bytes": len(data), "sha256": sha256(data)} for name, data in found.items() if name != MANIFEST
    }
    assert [path.name for path in bundle.path.parent.iterdir()] == ["bundle"], "nothing else stays behind"


def test_header_follows_from_the_manifest(tmp_path: Path) -> None:
    bundle = export(tmp_path / "bundle", name="flash_of_ours")
    text = (bundle.path / "flash_of_ours.h").read_text()
    assert header.render(bundle.manifest) == text
    assert "static inline int flash_of_ours_open(" in text
    assert "attention_" not in text


def test_header_has_room_for_the_launches_of_every_direction(tmp_path: Path) -> None:
    bundle = export(tmp_path / "bundle")
    counts = [len(target["launches"]) for each in bundle.manifest["problems"] for target in each["targets"]]
    assert min(counts) < max(counts)
    text = (bundle.path / "attention.h").read_text()
    assert f"attention_entry entries[{max(counts)}];" in text
    assert f"CUkernel kernels[2][{max(counts)}];" in text


def test_an_entry_that_the_exported_problem_does_not_launch_is_in_the_manifest(tmp_path: Path) -> None:
    """So many rows that no block splits its keys, and no combine kernel is launched; other problems need it."""
    bundle = export(tmp_path / "bundle", "forward", archs=("sm_90",), case="f16_d64_q1_s256_b64_h64_full")
    (plan,) = bundle.plans("forward")
    assert (plan.build.family, len(plan.launches)) == ("decode", 1)
    (target,) = bundle.manifest["problems"][0]["targets"]
    main, combine = target["launches"]
    assert main["when"] == "1"
    assert "num_splits_key" in combine["when"]
    assert combine["symbol"] == "fwd_decode_f16_d64_full_16x128_combine_1"
    assert combine["block"][0] > 0


def test_an_export_refuses_rules_that_are_not_the_planner_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_rules, "launch_condition", lambda build, role: NUM_QUERIES > 1000)
    with pytest.raises(Stale, match="no plan launches the entry main; update the rules of bundles"):
        export(tmp_path / "bundle", "forward")


def test_a_bundle_is_a_folder_of_kernels(tmp_path: Path) -> None:
    bundle = export(tmp_path / "bundle")
    for artifact in bundle.artifacts:
        assert Folder(bundle.path)(artifact.build) == artifact == bundle(artifact.build)


def test_exports_are_the_same_in_every_byte(tmp_path: Path) -> None:
    assert snapshot(export(tmp_path / "a").path) == snapshot(export(tmp_path / "b").path)


@pytest.mark.parametrize(
    "case", ["bf16_d128_s512_b64_h16_causal", "bf16_d128_s512_b2_h4k2_causal", "bf16_d128_s4096_b1_h2_causal"]
)
def test_a_bundle_has_no_kernels_for_short_or_long_ones_alone(tmp_path: Path, case: str) -> None:
    for artifact in export(tmp_path / "bundle", case=case).artifacts:
        assert kernel_of(artifact.build).lengths == "any"


def test_target_without_hopper_kernels_gets_the_portable_one(tmp_path: Path) -> None:
    bundle = export(tmp_path / "bundle", "backward", archs=("sm_90", "sm_90a"), case="f32_d64_s200_b2_h3_causal")
    (target,) = bundle.manifest["problems"][0]["targets"]
    assert (target["arch"], target["later_minors"]) == ("sm_90", True)
    assert "float32" in target["reason"]


def test_plan_that_does_not_compile_leaves_the_turn_to_the_next(tmp_path: Path) -> None:
    def artifact(build: Build) -> Artifact:
        if build.family == "sm90":
            raise CompileError(f"{build.symbol} spills")
        return fakes.artifact(build)

    assert export(tmp_path / "a", kernels=artifact).artifacts[0].build.family == "sm80"

    def none(build: Build) -> Artifact:
        raise CompileError(f"{build.symbol} spills")

    with pytest.raises(CompileError, match="fwd_sm90_bf16_d64_causal_192x128 spills"):
        export(tmp_path / "b", kernels=none)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("query_row", "elements from one row of query to the next"),
        ("key_scale_tile", "elements from one tile of key_scale to the next"),
        ("grad_value", "gradient of value"),
        ("counter_address", "address of counter, which is in device memory"),
        ("counter", "counter"),
    ],
)
def test_meanings_of_names_that_no_table_has(name: str, meaning: str) -> None:
    assert numbers.meaning(name) == meaning


NAMED = ("inputs", "pointers", "files")  # objects whose keys are names
OTHERS = ("problem", "plan")  # objects of another schema


def keys_of(data: Any, named: bool = False) -> set[str]:
    """Every key of the manifest that is part of its schema."""
    if isinstance(data, list):
        return {key for item in data for key in keys_of(item)}
    if not isinstance(data, dict):
        return set()
    inner = {key for name, item in data.items() if name not in OTHERS for key in keys_of(item, name in NAMED)}
    return inner if named else inner | set(data)


def test_schema_is_documented(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "bundles.md").read_text()
    manifest = export(tmp_path / "bundle", archs=("sm_80", "sm_90a")).manifest
    known = keys_of(manifest)
    assert {"format", "later_minors", "swizzle", "grid_rules", "sha256"} <= known
    assert [key for key in sorted(known) if f"`{key}`" not in text] == []
    assert [name for name in FUNCTIONS if f"`{name}(" not in text] == []


def test_example_and_page_name_the_same_commands() -> None:
    page = (ROOT / "docs" / "bundles.md").read_text()
    comment = (ROOT / "examples" / "cpp_host" / "main.cpp").read_text().split("#include")[0]
    for words in ("cutlass-py-attn export --problem bf16_d128_s512_b2_h4_causal --arch sm_80,sm_90a -o bundle",
                  "-l:libcuda.so.1 -o cpp_host", "./cpp_host bundle"):  # fmt: skip
        assert words in page
        assert words in comment


# What is refused


def test_every_objection_at_once(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    twice = problem_of("forward"), problem_of("forward")
    expect_raised(
        lambda: export_bundle(tmp_path, twice, ("sm_10", "sm_80"), name="Attention", kernels=fakes.artifact),
        [
            "problems: one for each direction",
            "name: lower-case letters",
            "folder: holds notes.txt",
            "arch: one of sm_80",
        ],
    )
    assert snapshot(tmp_path) == {"notes.txt": b"mine"}
    with pytest.raises(NotSupported, match=r"problems = .*\narchs = \(\) "):
        export_bundle(tmp_path / "new", (), (), kernels=fakes.artifact)


@pytest.mark.parametrize("case", ["bf16_d64_s200_b70000_h1_causal", "bf16_d64_s200_b0_h1_causal"])
def test_problems_that_no_single_launch_serves(tmp_path: Path, case: str) -> None:
    with pytest.raises(NotSupported, match=r"forward: batch must be at (most 65535|least 1)"):
        export(tmp_path / "bundle", case=case)
    assert list(tmp_path.iterdir()) == []


def test_wrong_problem_is_refused_before_anything_compiles(tmp_path: Path) -> None:
    def artifact(build: Build) -> Artifact:
        raise AssertionError("not yet")

    wrong = problem_of("forward").replace(dropout_p=2.0)
    with pytest.raises(NotSupported, match=r"dropout_p = 2\.0"):
        export_bundle(tmp_path / "bundle", (wrong,), ("sm_80",), kernels=artifact)


def test_header_without_jinja2_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(NotSupported, match=r"the C header needs jinja2: pip install 'click>=8.2' .*'jinja2>=3.1'"):
        export(tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _edit(path: Path) -> None:
    data = json.loads(path.read_text())
    data["problems"][0]["targets"][0]["launches"][0]["grid"][0] += 1
    path.write_text(json.dumps(data))


def _newer(path: Path) -> None:
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), "format": "cutlass_py_attn bundle 6"})))


DAMAGES = {
    "cut cubin": (
        "sm_90a/fwd_sm90_bf16_d64_causal_192x128.cubin",
        _cut,
        "differs from what was written; delete it and export it again",
    ),
    "lost PTX": ("sm_90a/fwd_sm90_bf16_d64_causal_192x128.ptx", os.remove, "cannot be read (No such file"),
    "other header": ("attention.h", _cut, "differs from what was written"),
    "cut manifest": (MANIFEST, _cut, "no bundle, its manifest.json cannot be read"),
    "no manifest": (MANIFEST, os.remove, "no bundle, its manifest.json cannot be read"),
    "edited manifest": (MANIFEST, _edit, "differs from what was written"),
    "newer format": (
        MANIFEST,
        _newer,
        "format 'cutlass_py_attn bundle 6', this version reads 'cutlass_py_attn bundle 5'",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_bundles_are_named(tmp_path: Path, name: str) -> None:
    file, damage, words = DAMAGES[name]
    bundle = export(tmp_path / "bundle", "forward")
    assert load_bundle(bundle.path).manifest == bundle.manifest
    damage(bundle.path / file)
    with pytest.raises(Stale) as caught:
        load_bundle(bundle.path)
    assert words in str(caught.value)
    assert str(bundle.path) in str(caught.value)


def test_seal_is_of_the_rest(tmp_path: Path) -> None:
    manifest = export(tmp_path / "bundle").manifest
    assert sealed(manifest) == manifest
    rest = {key: value for key, value in manifest.items() if key != SEAL}
    assert manifest[SEAL] == sha256(json.dumps(rest, sort_keys=True).encode())


# What loads it


def test_loading_needs_no_compiler(tmp_path: Path) -> None:
    """Nor jinja2, click or rich: what the package depends on is enough."""
    bundle = export(tmp_path / "bundle")
    code = (
        "import sys\n"
        "for name in ('cutlass', 'nvidia_cutlass_dsl', 'jinja2', 'click', 'rich'): sys.modules[name] = None\n"
        "import cutlass_py_attn as attn\n"
        f"bundle = attn.load_bundle({str(bundle.path)!r})\n"
        "print(bundle.directions, bundle.plans('backward')[0].symbol, len(bundle.artifacts))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "('forward', 'backward') bwd_sm90_bf16_d64_causal_key_registers_128x128 2\n"


def test_bundle_gives_its_problem_and_plan_back(tmp_path: Path) -> None:
    bundle = export(tmp_path / "bundle", archs=("sm_80", "sm_90a"))
    for direction in DIRECTIONS:
        assert bundle.problem(direction) == problem_of(direction)
        assert [plan.build.arch for plan in bundle.plans(direction)] == ["sm_90a", "sm_80"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bound_bundle_launches_the_plan(driver_log: FakeDriver, tmp_path: Path, direction: str) -> None:
    bundle = export(tmp_path / "bundle")
    bound = bundle.bind(direction)
    bound(addresses(bound.tensor_names))
    (plan,) = bundle.plans(direction)
    found = [(call.text, call.grid) for call in driver_log.of("cuLaunchKernelEx")]
    assert found == [(launch.symbol, launch.grid) for launch in plan.launches]


def test_attention_takes_a_bundle_s_kernels(driver_log: FakeDriver, tmp_path: Path) -> None:
    bundle = export(tmp_path / "bundle")
    query, key, value = (aligned((1, 77, 5, 64), ml_dtypes.bfloat16) for _ in range(3))
    attention_forward(query, key, value, mask=Causal(), kernels=bundle)
    assert [call.text for call in driver_log.of("cuLaunchKernelEx")] == ["fwd_sm90_bf16_d64_causal_192x128_0"]
    with pytest.raises(Stale, match=r"fwd_sm90_bf16_d64_full_64x128 for sm_90a: .*has bwd_sm90_.*; export"):
        attention_forward(query, key, value, kernels=bundle)


def test_bind_says_what_is_missing(driver_log: FakeDriver, tmp_path: Path) -> None:
    bundle = export(tmp_path / "bundle", "forward", archs=("sm_90a", "sm_80"))
    with pytest.raises(NotSupported, match=r"direction = 'backward' .*bundle has forward; export it too"):
        bundle.bind("backward")
    with pytest.raises(Stale, match=r"this forward problem needs other kernels than .*; export it"):
        bundle.bind("forward", problem_of("forward").replace(softcap=3.0))
    assert bundle.bind("forward", device=1).plan.build.arch == "sm_80", "fake GPU 1 is an sm_86 part"
    hopper = export(tmp_path / "sm90", "forward")
    with pytest.raises(Stale, match=r"sm90 is for sm_90a: fake GPU 1 has compute capability 8\.6; export for it"):
        hopper.bind("forward", device=1)


def test_bad_arguments_of_a_bundle(driver_log: FakeDriver, tmp_path: Path) -> None:
    bundle: Any = export(tmp_path / "bundle", "forward")
    driver_log.clear()
    for call, given in (
        (lambda: bundle(5), "build = 5 (int): must be a Build"),
        (lambda: bundle(bundle.plans("forward")[0]), "build = Plan("),
        (lambda: bundle.problem(["forward"]), "direction = ['forward']"),
        (lambda: bundle.plans(None), "direction = None"),
        (lambda: bundle.bind("up"), "direction = 'up'"),
        (lambda: bundle.bind("forward", 5), "problem = 5 (int): must be a Problem"),
        (lambda: bundle.bind("forward", problem_of("forward").replace(scale="x")), "scale = 'x' (str)"),
        (lambda: bundle.bind("forward", device="0"), "device = '0' (str): must be the ordinal of a GPU"),
        (lambda: bundle.bind("forward", device=1.0), "device = 1.0 (float): must be the ordinal of a GPU"),
    ):
        with pytest.raises(NotSupported, match=re.escape(given)):
            call()
    assert driver_log.names == []


def test_bind_prefers_what_fits(driver_log: FakeDriver, tmp_path: Path) -> None:
    """sm_80's backward of wide heads asks for more shared memory than an sm_86 part has."""
    case = "bf16_d128_s200_b2_h3_causal"
    bundle = export(tmp_path / "bundle", "backward", archs=("sm_80", "sm_86"), case=case)
    sizes = [plan.build.shared_memory_bytes for plan in bundle.plans("backward")]
    assert sizes[0] <= 101376 < sizes[1]
    assert bundle.bind("backward", device=1).plan.build.arch == "sm_86"


def test_bind_skips_a_better_target_that_does_not_fit(
    driver_log: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An sm_89 part runs sm_87's kernels too, and has less shared memory."""
    gpu = dataclasses.replace(driver.device(1), compute_capability=(8, 9))
    monkeypatch.setattr(driver, "device", lambda ordinal: gpu)
    case = "bf16_d128_s200_b2_h3_causal"
    bundle = export(tmp_path / "bundle", "backward", archs=("sm_86", "sm_87"), case=case)
    assert [plan.build.arch for plan in bundle.plans("backward")] == ["sm_87", "sm_86"]
    assert bundle.bind("backward", device=1).plan.build.arch == "sm_86"
    # Two that fit: the better one.
    both = export(tmp_path / "both", "backward", archs=("sm_86", "sm_89"), case=case)
    assert both.bind("backward", device=1).plan.build.arch == "sm_89"
    # One that does not fit: the error of the launch says so.
    one = export(tmp_path / "one", "backward", archs=("sm_87",), case=case)
    with pytest.raises(AttentionError, match="shared memory"):
        one.bind("backward", device=1)


# The command


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(group, ["export", *arguments])


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "compiler", lambda: lambda build: (fakes.artifact(build), "0.5 s"))


@pytest.mark.usefixtures("no_compiler")
def test_command_exports_a_case(tmp_path: Path) -> None:
    done = invoke("--problem", CASE, "--arch", "sm_80,sm_90a", "--arch", "sm_100", "-o", str(tmp_path / "bundle"))
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line.split(";")[0].rpartition("_")[0] for line in lines[:-1]] == [
        "forward for sm_90a: fwd_sm90_bf16_d64_causal",
        "forward for sm_100: fwd_sm80_bf16_d64_causal",
        "forward for sm_80: fwd_sm80_bf16_d64_causal",
        "backward for sm_90a: bwd_sm90_bf16_d64_causal_key_registers",
        "backward for sm_100: bwd_sm80_bf16_d64_causal",
        "backward for sm_80: bwd_sm80_bf16_d64_causal",
    ]
    assert lines[-1].startswith("20 files, ")
    assert load_bundle(tmp_path / "bundle").directions == DIRECTIONS


@pytest.mark.usefixtures("no_compiler")
def test_command_exports_a_problem_of_json(tmp_path: Path) -> None:
    problem = problem_of("backward").replace(scale=0.25)
    (tmp_path / "problem.json").write_text(json.dumps(to_json(problem)))
    options = ("--arch", "sm_80", "--name", "ours", "-o", str(tmp_path / "bundle"))
    done = invoke("--problem", str(tmp_path / "problem.json"), "--problem", CASE, "--direction", "forward", *options)
    assert done.exit_code == 0, done.output
    assert load_bundle(tmp_path / "bundle").directions == ("forward",)
    done = invoke("--problem", str(tmp_path / "problem.json"), *options)
    assert done.exit_code == 0, done.output
    bundle = load_bundle(tmp_path / "bundle")
    assert (bundle.problem("backward"), bundle.directions) == (problem, ("backward",))
    assert (bundle.path / "ours.h").is_file()


def test_command_takes_built_kernels(tmp_path: Path) -> None:
    made = export(tmp_path / "built", archs=("sm_80",))
    done = invoke("--problem", CASE, "--arch", "sm_80", "--kernels", str(made.path), "-o", str(tmp_path / "bundle"))
    assert done.exit_code == 0, done.output
    assert snapshot(tmp_path / "bundle") == snapshot(made.path)
    done = invoke("--problem", CASE, "--arch", "sm_90", "--kernels", str(made.path), "-o", str(tmp_path / "bundle"))
    assert done.exit_code == 1
    assert "Error: fwd_sm80_bf16_d64_causal_128x128 for sm_90: not in" in done.output


def test_command_refuses_crafted_json(tmp_path: Path) -> None:
    """Of a problem: nested too deeply, or with values of other types."""
    problem = tmp_path / "problem.json"
    written = to_json(problem_of("forward"))
    strange = json.dumps({**written, "query": {**written["query"], "shape": "abc"}})
    for text, words in (
        (crafted_json.DEEP, "more than 64 nested lists and objects"),
        ("[]", "problem with list: must have"),
        (strange, "query.shape = 'abc' (str): must be a list"),
    ):
        problem.write_text(text)
        done = invoke("--problem", str(problem), "--arch", "sm_80", "-o", str(tmp_path / "bundle"))
        assert (done.exit_code, done.output.count("\n")) == (1, 1), done.output
        assert words in done.output


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ("nonsense", "problem 'nonsense': 'nonsense' is no word of the grammar"),
        ("nowhere.json", "problem nowhere.json: cannot be read"),
        ("pyproject.toml.json", "cannot be read"),
    ],
)
def test_command_refuses_in_one_sentence(tmp_path: Path, problem: str, words: str) -> None:
    done = invoke("--problem", problem, "--arch", "sm_80", "-o", str(tmp_path / "bundle"))
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert words in done.output
    assert list(tmp_path.iterdir()) == []
