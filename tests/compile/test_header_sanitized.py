"""Tests of the C header under the sanitizers: numbers of any size are refused or right, and no arithmetic overflows.

The header is compiled with -fsanitize=undefined, and with -fsanitize=address where the compiler has it. What it answers
is compared with the rules of the manifest, which the example that reads the manifest alone evaluates.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from host import FUNCTIONS as FUNCTIONS_OF_RULES
from host import Host, evaluate

from cutlass_py_attn.bundle.files import Bundle
from cutlass_py_attn.problem import spec
from cutlass_py_attn.problem.tensors import DIRECTIONS
from tests.support import fake_driver
from tests.support.bundle_hosts import WORKSPACE, cuda_headers, described, exported
from tests.support.c_compiler import STRICT, build, compiler
from tests.support.listed_plans import with_blocks

# The exported cases of each program.
CASES = {
    "sm90": ("bf16_d128_s512_b2_h4_causal", DIRECTIONS),
    "sm80, every feature": (
        "bf16_d128_s1000_b2_h4k2_causal_window64_biassum_dropout0.1_softcap30_alibi_sinks",
        DIRECTIONS,
    ),
    "sm90, sequences": ("bf16_d128_s700_t5000_h2_full", DIRECTIONS),
    "sm80, sequences": ("f32_d64_s700_t5000_h2_full_deterministic", DIRECTIONS),
    "decode": ("bf16_d128_q4_s8192_b1_h8k2_full", ("forward",)),
    "latent codes": ("bf16_d576v512_q1_s640_b4_h16k1_full_mla_kv8_descaletile", ("forward",)),
    "masks in memory": ("bf16_d128_s512_b2_h4k2_causal_rangesbh", DIRECTIONS),
}
DRAWN = 600  # calls of each pass with several numbers changed
SMS = 132  # of the fake driver's GPU 0
INT64 = range(-(2**63), 2**63)
POWERS = (0, 4, 16, 29, 31, 32, 40, 47, 61, 62, 63)
EXTREMES = [n for bits in POWERS for off in (-1, 0, 1) for n in (2**bits + off, -(2**bits) + off) if n in INT64]
SIZES = (0, 1, 2, 3, 8, 16, 31, 64, 500, 1024, 2**16 - 1, 2**20, 2**29)
FACTORS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e38, 2.0**127, -(2.0**127), 3e38, 1e300, math.inf, -math.inf, math.nan)

PROGRAM = r"""
#include "attention.h"
void fake_driver_clear(void);
void fake_driver_without_memory(int without);
static attention_bundle opened, zeroed, garbage;

static int numbers(int64_t *const ints[], int int_count, double *const doubles[], int double_count) {
    for (int i = 0; i < int_count; i++) {
        long long value;
        if (scanf("%lld", &value) != 1) return 0;
        *ints[i] = value;
    }
    for (int i = 0; i < double_count; i++)
        if (scanf("%lf", doubles[i]) != 1) return 0;
    return 1;
}
/* Each call prints code and bytes of its workspace, code of its launch, and of a workspace for contiguous strides. */
#define COUNT(array) (int)(sizeof array / sizeof *array)
#define RUN(DIRECTION, WORKSPACE) \
    for (;;) { \
        attention_##DIRECTION##_call contiguous; \
        int64_t bytes = -7, other = -7; \
        if (!numbers(ints, COUNT(ints), doubles, COUNT(doubles))) break; \
        int code = attention_##DIRECTION##_workspace(&opened, &c, &bytes); \
        int launched = attention_##DIRECTION(&opened, &c, WORKSPACE, NULL); \
        contiguous = c; \
        attention_##DIRECTION##_contiguous(&contiguous); \
        int again = attention_##DIRECTION##_workspace(&opened, &contiguous, &other); \
        if (attention_##DIRECTION##_workspace(&zeroed, &c, &other) != -1) return 4; \
        if (attention_##DIRECTION##_workspace(&garbage, &c, &other) != -1) return 5; \
        if (attention_##DIRECTION##_workspace(&opened, &c, NULL) != -1) return 6; \
        if (attention_##DIRECTION##_workspace(&opened, NULL, &other) != -1) return 7; \
        if (attention_##DIRECTION##_workspace(NULL, &c, &other) != -1) return 8; \
        fake_driver_clear(); \
        printf("%d %lld %d %d\n", code, (long long)bytes, launched, again); \
    }

int main(int argc, char **argv) {
    CUcontext context;
    if (argc != 3 || cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 2;
    fake_driver_without_memory(1);
    memset(&garbage, 0xA5, sizeof garbage);
    if (attention_open(NULL, argv[1], 0) != -1 || attention_open(&opened, NULL, 0) != -1) return 3;
    if (attention_open(&opened, argv[1], 0)) return puts(opened.error), 3;
    PASSES
    attention_close(&opened);
    attention_close(&opened);
    attention_close(&zeroed);
    attention_close(&garbage);
    attention_close(NULL);
    return 0;
}
"""
PASS = """
    if (!strcmp(argv[2], "DIRECTION")) {
        attention_DIRECTION_call c;
        int64_t *const ints[] = {INTS};
        double *const doubles[] = {DOUBLES};
        attention_DIRECTION_init(&c);
        ADDRESSES
        RUN(DIRECTION, WORKSPACE)
    }
"""


FUNCTIONS = r"""
#include "attention.h"
int main(void) {
    int function;
    long long a[8];
    while (scanf("%d %lld %lld %lld %lld %lld %lld %lld %lld", &function, a, a + 1, a + 2, a + 3, a + 4, a + 5, a + 6, a + 7) == 9) {
        int invalid = 0;
        int64_t value = 0;
        switch (function) {
        case 0: value = attention_add(&invalid, a[0], a[1]); break;
        case 1: value = attention_sub(&invalid, a[0], a[1]); break;
        case 2: value = attention_mul(&invalid, a[0], a[1]); break;
        case 3: value = attention_div(&invalid, a[0], a[1]); break;
        case 4: value = attention_ceil_div(&invalid, a[0], a[1]); break;
        case 5: value = attention_mod(&invalid, a[0], a[1]); break;
        case 6: value = attention_round_up(&invalid, a[0], a[1]); break;
        case 7: value = attention_fewest_splits(&invalid, a[0], a[1], a[2]); break;
        default: value = attention_distinct(&invalid, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
        }
        if (invalid) puts("invalid");
        else printf("%lld\n", (long long)value);
    }
    return 0;
}
"""  # noqa: E501
DIGESTS = r"""
#include "attention.h"
int main(void) {
    static unsigned char data[1 << 20];
    size_t size = fread(data, 1, sizeof data, stdin);
    for (size_t part = 0; part <= size; part += part < 300 ? 1 : 50021) {
        unsigned char *exact = (unsigned char *)malloc(part + 1); /* so that a read behind the end is found */
        char text[65];
        memcpy(exact, data, part);
        attention_sha256(exact, part, text);
        puts(text);
        free(exact);
    }
    return 0;
}
"""


@dataclass(frozen=True)
class Answer:
    """What a host answers to a call. bytes: of the workspace; None for a refused call."""

    bytes: int | None
    grids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Program:
    """The header in a program with sanitizers."""

    path: Path
    bundle: Bundle

    def run(self, direction: str, calls: list[dict[str, float]]) -> list[tuple[int, int, int, int]]:
        """Returns what the program prints for each call."""
        inputs = described(self.bundle, direction)["inputs"]
        names = sorted(inputs, key=lambda name: inputs[name]["type"] == "f64")
        given = (" ".join(repr(call[name]) for name in names) for call in calls)
        lines = output_of(self.path, str(self.bundle.path), direction, given="\n".join(given))
        found = [tuple(map(int, line.split())) for line in lines]
        assert len(found) == len(calls)
        return found  # type: ignore[return-value]


@functools.cache
def sanitizers() -> str:
    """Returns the option that names the sanitizers of the compiler; skips without one."""
    for names in ("undefined,float-cast-overflow,address", "undefined,float-cast-overflow"):
        option = f"-fsanitize={names}"
        command = [compiler("c"), option, "-x", "c", "-", "-o", os.devnull]
        done = subprocess.run(
            command, input="int main(void) { return 0; }", capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return option
    pytest.skip("the C compiler has no sanitizers")


@pytest.fixture(scope="module", params=CASES)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Program:
    fake_driver.need_compiler("the fake driver")
    case, directions = CASES[request.param]
    folder = tmp_path_factory.mktemp("sanitized")
    problems = [spec.parse(case).problem(direction) for direction in directions]
    if problems[0].form.has_ranges:
        problems = [*map(with_blocks, problems)]
    bundle = exported(folder / "bundle", tuple(problems))
    return Program(compiled(folder, bundle, source(bundle)), bundle)


def compiled(folder: Path, bundle: Bundle, text: str) -> Path:
    """Returns a program that includes the bundle's header and stops at the first finding of a sanitizer."""
    (folder / "program.c").write_text(text)
    folders = ("-I", str(bundle.path), "-isystem", cuda_headers())
    options = (sanitizers(), "-fno-sanitize-recover=all", "-std=c11", "-O1", *STRICT)
    files = (str(folder / "program.c"), str(fake_driver.library()), "-o", str(folder / "program"))
    build([compiler("c"), *options, *folders, *files])
    return folder / "program"


def output_of(program: Path, *arguments: str, given: str | bytes) -> list[str]:
    """Returns the lines that the program prints; a finding of a sanitizer fails the test."""
    folder = str(fake_driver.library().parent)
    environment = {**os.environ, "LD_LIBRARY_PATH": folder, "ASAN_OPTIONS": "detect_leaks=0"}
    data = given.encode() if isinstance(given, str) else given
    done = subprocess.run([str(program), *arguments], input=data, capture_output=True, check=False, env=environment)
    assert (done.stderr.decode(), done.returncode) == ("", 0), done.stdout[-300:]
    return done.stdout.decode().splitlines()


def source(bundle: Bundle) -> str:
    """Returns the program's text."""
    passes = []
    for item in bundle.manifest["problems"]:
        direction = item["direction"]
        fields: dict[str, list[str]] = {"i64": [], "f64": []}
        for name, each in item["inputs"].items():
            fields[each["type"]].append(f"&c.{name}")
        text = PASS.replace("WORKSPACE", str(WORKSPACE)).replace("DIRECTION", direction)
        text = text.replace("INTS", ", ".join(fields["i64"])).replace("DOUBLES", ", ".join(fields["f64"]))
        passes.append(text.replace("ADDRESSES", " ".join(f"c.{name} = 4096;" for name in item["pointers"])))
    return PROGRAM.replace("    PASSES", "".join(passes))


def calls_of(inputs: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Yields calls: every input with every extreme value, then several inputs at once."""
    exported_call = {name: item["value"] for name, item in inputs.items()}
    yield exported_call
    values = {name: FACTORS if item["type"] == "f64" else EXTREMES for name, item in inputs.items()}
    yield from ({**exported_call, name: value} for name, choices in values.items() for value in choices)
    draw = random.Random(0)
    sizes = [name for name in inputs if name.startswith(("batch", "num_", "tokens_"))]
    for number in range(DRAWN):
        call = dict(exported_call)
        chosen = sizes if number % 2 else list(inputs)
        for name in draw.sample(chosen, draw.randint(1, len(chosen))):
            call[name] = draw.choice(SIZES if name in sizes and number % 4 < 3 else values[name])
        if "num_heads_key" in call and draw.random() < 0.7:
            call["num_heads_key"] = call["num_heads"]
        yield call


def reader_of(bundle: Bundle, direction: str) -> Host:
    """The example that reads the manifest, without its driver."""
    found = Host.__new__(Host)
    found.passed = described(bundle, direction)
    found.target = found.passed["targets"][0]
    found.num_sms = SMS
    return found


def answer(host: Host, call: dict[str, float]) -> Answer:
    """Returns what the manifest's rules say, and checks that each number fits in its field."""
    try:
        names = host.numbers(call)
        total, zeroed, offsets = host.workspace(names)
    except ValueError:
        return Answer(None)
    assert 0 <= zeroed <= total < 2**52
    buffers = {name: WORKSPACE + offset for name, offset in offsets.items()}
    host.struct(names, dict.fromkeys(host.passed["pointers"], 4096), buffers)  # an error for a field that is too narrow
    grids = tuple(tuple(evaluate(rule, names) for rule in it["grid_rules"]) for it in host.target["launches"])
    for x, y, z in grids:
        assert 1 <= x < 2**31
        assert 1 <= y <= 65535
        assert 1 <= z <= 65535
    return Answer(total, grids)


def test_any_number_is_refused_or_right(program: Program) -> None:
    for item in program.bundle.manifest["problems"]:
        direction = item["direction"]
        calls = list(calls_of(item["inputs"]))
        expected = [answer(reader_of(program.bundle, direction), call) for call in calls]
        found = program.run(direction, calls)
        differing = [
            (call, wanted, got)
            for call, wanted, got in zip(calls, expected, found, strict=True)
            if (0 if wanted.bytes is not None else -1, wanted.bytes, got[2]) != (got[0], bytes_of(got), got[0])
        ]
        assert differing == []
        allowed = sum(wanted.bytes is not None for wanted in expected)
        assert allowed > len(calls) // 20, "some calls are right"
        assert len(calls) - allowed > len(calls) // 4, "some are refused"
        assert {code for *_, code in found} == {0, -1}


def bytes_of(found: tuple[int, int, int, int]) -> int | None:
    """Returns the workspace of a call that the program accepted; a refused one leaves the number as it was."""
    code, size, _, _ = found
    assert code == 0 or size == -7
    return size if code == 0 else None


# The functions of rules


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Bundle]:
    fake_driver.need_compiler("the fake driver")
    folder = tmp_path_factory.mktemp("functions")
    return folder, exported(folder / "bundle", (spec.parse(CASES["decode"][0]).problem("forward"),))


NAMES = ("add", "sub", "mul", "div", "ceil_div", "mod", "round_up", "fewest_splits", "distinct")
EXPECTED: dict[str, Callable[..., int]] = {
    **FUNCTIONS_OF_RULES, "add": operator.add, "sub": operator.sub, "mul": operator.mul,
}  # fmt: skip


def of_rules(name: str, arguments: tuple[int, ...]) -> str:
    """Returns what the header prints for a function of Python's integers."""
    try:
        value = EXPECTED[name](*arguments)
    except ValueError:
        return "invalid"
    return str(value) if value in INT64 else "invalid"


def test_functions_are_those_of_integers_that_have_no_end(small: tuple[Path, Bundle]) -> None:
    folder, bundle = small
    draw = random.Random(1)
    numbers = sorted({*EXTREMES, *SIZES, *(-size for size in SIZES), 5, 7, -5, -7})
    calls = [(name, (a, b)) for name in NAMES[:7] for a in numbers for b in numbers]
    calls += [("fewest_splits", (draw.choice(numbers[-40:]), draw.choice(numbers[-40:]), draw.choice((1, 132))))
              for _ in range(200)]  # fmt: skip
    calls += [("distinct", tuple(draw.choice(numbers if number % 2 else SIZES) for _ in range(8)))
              for number in range(2000)]  # fmt: skip
    padded = ((NAMES.index(name), *arguments, *[0] * (8 - len(arguments))) for name, arguments in calls)
    lines = (" ".join(map(str, numbers)) for numbers in padded)
    found = output_of(compiled(folder, bundle, FUNCTIONS), given="\n".join(lines))
    assert len(found) == len(calls)
    differing = [
        (name, arguments, got)
        for (name, arguments), got in zip(calls, found, strict=True)
        if got != of_rules(name, arguments) and not (name == "fewest_splits" and got == "invalid")
    ]
    assert differing == []
    assert {line for (name, _), line in zip(calls, found, strict=True) if name == "distinct"} == {"0", "1", "invalid"}


def test_sha256_is_that_of_python(small: tuple[Path, Bundle]) -> None:
    folder, bundle = small
    data = random.Random(2).randbytes(200_000)
    found = output_of(compiled(folder, bundle, DIGESTS), given=data)
    sizes = [*range(301), *range(300 + 50021, len(data) + 1, 50021)]
    assert found == [hashlib.sha256(data[:size]).hexdigest() for size in sizes]
