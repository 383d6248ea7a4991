"""Stress builds: where delays are, whom they delay, and that nothing else changes; on text, executed and assembled."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cutlass_py_attn.artifact import Artifact, Kernel, Parameter
from cutlass_py_attn.compilation import cubin
from cutlass_py_attn.errors import CompileError
from cutlass_py_attn.launch.build import Build, build_from
from tests.support.ptx_threads import Array, Threads
from tools.lab.race import stress_builds
from tools.lab.race.stress_builds import Delay, delays, roles, with_delay
from tools.release import record

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = record.read_manifest(ROOT)["kernels"]
BACKWARD, FORWARD = "sm_90a/bwd_sm90_bf16_d128_causal_ds_registers_64x128", "sm_90a/fwd_sm90_bf16_d64_full_192x128"
SM80, DECODE = "sm_90/bwd_sm80_f16_d64_full_128x128", "sm_90/fwd_decode_bf16_d128_full_grouped_16x128"
COMPONENT_GEMM = "sm_90a/grad_v_sm90_bf16_d64_64x64"
NAMES = (BACKWARD, FORWARD, SM80, DECODE, COMPONENT_GEMM)

# Two entries; the first has a wait that tries again, a signal under a predicate, a barrier and no place in a comment.
PTX = """.version 8.8
.visible .entry main_0(
	.param .b64 main_0_param_0
)
.reqntid 128, 1, 1
{
	.reg .b32 %r<3>;
	// begin inline asm
	{
	.reg .pred P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, 10000000;
	@P1 bra.uni DONE;
	bra.uni LAB_WAIT;
	DONE:
	}
	// end inline asm; bar.sync 0;
	mov.b64 %rd1, {%r1, %r2};
	@%p1 mbarrier.arrive.shared.b64 %rd2, [%r1];
	bar.sync 0;  // all
	cp.async.commit_group;
	ret;
}
.visible .entry other_1()
{
	bar.sync 	0;
	ret;
}
"""


def build_of(name: str) -> Build:
    return build_from(MANIFEST[name]["plan"])


def ptx_of(name: str) -> str:
    return (ROOT / "ptx" / f"{name}.ptx").read_text()


def test_a_delay_stands_behind_every_place_of_its_entries_and_nowhere_else() -> None:
    delay = Delay("late", ("main_0",), range(1, 3))
    late = with_delay(PTX, delay)
    before = [part.rstrip().rsplit("\n", 1)[-1].strip() for part in late.split(delay.block)[:-1]]
    assert before == ["}", "@%p1 mbarrier.arrive.shared.b64 %rd2, [%r1];", "bar.sync 0;  // all"]
    assert late.replace(delay.block, "") == PTX
    assert delay.block not in late[late.index("other_1") :]
    other = Delay("late", ("other_1",), range(1))
    assert with_delay(PTX, other) == PTX.replace("bar.sync \t0;\n", f"bar.sync \t0;\n{other.block}")
    assert with_delay(PTX, Delay("late", ("third_2",), range(1))) == PTX


@pytest.mark.parametrize("name", NAMES)
def test_shown_kernels_are_delayed_where_they_wait_and_signal(name: str) -> None:
    ptx, build = ptx_of(name), build_of(name)
    found = delays(build)
    assert {delay.role for delay in found} >= set(roles(build))
    for delay in found:
        late = with_delay(ptx, delay)
        assert late != ptx
        assert late.replace(delay.block, "") == ptx
        for entry in late.split(".entry ")[1:]:
            is_late = entry[: entry.index("(")] in delay.entries
            places = sum(stress_builds._PLACE.match(line) is not None for line in entry.splitlines())
            assert entry.count(delay.block) == (places if is_late else 0)
    assert ptx == ptx_of(name)


def test_no_wait_or_signal_of_a_shown_kernel_is_overlooked() -> None:
    words = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z]\S*(?:wait|arrive|acquire|\.release|bar\.sync)\S*)", re.MULTILINE)
    found = {word for path in (ROOT / "ptx").glob("*/*.ptx") for word in words.findall(path.read_text())}
    assert len(found) > 5
    overlooked = {word for word in found if not stress_builds._PLACE.match(word)}
    # A fence waits for nobody, and the entry ahead does not wait for the one that waits for its end.
    assert overlooked == {"fence.mbarrier_init.release.cluster;", "griddepcontrol.wait;"}


def test_roles_of_the_sm90_family_are_all_its_warps() -> None:
    forward, backward = roles(build_of(FORWARD)), roles(build_of(BACKWARD))
    assert list(backward) == ["load", "grad_query", "products_0", "products_1"]
    assert list(forward) == ["load", "products_0", "products_1", "products_2"]
    for build, found in ((build_of(FORWARD), forward), (build_of(BACKWARD), backward)):
        assert [warp for warps in found.values() for warp in warps] == list(range(build.warps))


class Sleepers(Threads):
    """Threads that note how long each of them sleeps."""

    def __init__(self, body: str, block: int) -> None:
        # One statement a line, without the braces around a delay.
        flat = body.replace("\t{\n", "").replace("\t}\n", "")
        ptx = f".entry sleepers() {{\n{flat}\tret;\n}}"
        super().__init__(ptx, (2, 1), block, np.zeros(1, np.uint8), np.zeros(1, np.uint8))
        self.slept = np.zeros(2 * block, np.int64)

    def execute(self, op: str, operands: list[str], active: Array) -> None:
        if op == "nanosleep.u32":
            self.slept += np.where(active, self.value(operands[0]).astype(np.int64), 0)
        else:
            super().execute(op, operands, active)


@pytest.mark.parametrize("name", [BACKWARD, FORWARD, SM80])
def test_one_role_sleeps_and_no_other(name: str) -> None:
    build = build_of(name)
    for role, warps in roles(build).items():
        threads = Sleepers(Delay(role, ("main",), warps).block, build.threads)
        threads.run()
        late = np.isin(np.arange(2 * build.threads) % build.threads // 32, warps)
        np.testing.assert_array_equal(threads.slept, np.where(late, stress_builds.SLEEP_NANOSECONDS, 0))


@pytest.fixture
def assembler() -> Path:
    """The wheel's ptxas; skips where there is another one, or none."""
    try:
        importlib.metadata.version("nvidia-cuda-nvcc-cu12")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip('needs pip install ".[stress]"')
    return stress_builds.ptxas()


@functools.cache
def assembled(name: str) -> Artifact:
    """A committed kernel from its PTX."""
    entry = MANIFEST[name]
    kernels = tuple(
        Kernel(**{key: kernel[key] for key in Kernel.__slots__ if key != "parameters"},
               parameters=tuple(Parameter(*item) for item in kernel["parameters"]))
        for kernel in entry["kernels"]
    )  # fmt: skip
    plain = Artifact(build_of(name), ptx_of(name), b"", kernels, "the wheel", entry["allocation"])
    return stress_builds.assemble(plain.ptx, plain)


@pytest.mark.parametrize("name", NAMES)
def test_ptxas_gives_the_committed_machine_code(name: str, assembler: Path) -> None:
    found = assembled(name)
    assert record.sha256(found.cubin) == MANIFEST[name]["cubin_sha256"], assembler
    assert [kernel.registers for kernel in found.kernels] == [k["registers"] for k in MANIFEST[name]["kernels"]]


def test_builds_differ_in_the_entries_that_are_late(assembler: Path) -> None:
    plain = assembled(DECODE)
    made = dict(stress_builds.variants(plain))  # ptxas -O2 gives this kernel the machine code of -O3
    assert list(made) == ["plain", "O1", *(delay.name for delay in delays(plain.build))], assembler
    assert made.pop("plain") is plain
    codes = {name: cubin.code(artifact.cubin) for name, artifact in made.items()}
    before = cubin.code(plain.cubin)
    for delay in delays(plain.build):
        changed = {entry for entry in before if codes[delay.name][entry] != before[entry]}
        assert changed == set(delay.entries)
    assert codes["O1"] != before
    assert all(artifact.build == plain.build and artifact.cubin != plain.cubin for artifact in made.values())


def test_another_compilers_machine_code_is_refused(assembler: Path) -> None:
    with pytest.raises(CompileError, match=r"other machine code.*\.\[stress\]"):
        next(stress_builds.variants(replace(assembled(COMPONENT_GEMM), cubin=str(assembler).encode())))


def test_what_ptxas_says_of_bad_ptx_is_told(assembler: Path) -> None:
    plain = assembled(COMPONENT_GEMM)
    with pytest.raises(CompileError, match=r"ptxas -O3: .*frobnicate"):
        stress_builds.assemble(plain.ptx.replace("ret;", "frobnicate;", 1), plain)
    assert assembler.name == "ptxas"


def test_a_missing_ptxas_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.pathfinder

    def nothing(name: str) -> Any:
        assert name == "ptxas"

    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_binary_utility", nothing)
    with pytest.raises(CompileError, match=r"ptxas is not installed: pip install"):
        stress_builds.ptxas()
