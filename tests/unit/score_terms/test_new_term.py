"""Tests of a score term that a user registers: from the public functions to the struct, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from cutlass_py_attn import attention_backward, attention_forward, score_terms
from cutlass_py_attn.bundle import numbers
from cutlass_py_attn.cli.symbols import parse_symbol
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.launch import abi
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.plan.planner import plan_backward, plan_forward
from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.serialize import from_json, to_json
from cutlass_py_attn.problem.tensors import Shape, Tensor
from cutlass_py_attn.runtime import params
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.score_terms.term import StructFields, VectorOperand
from tests.cases.distance_squared import DistanceSquared, distance_squared
from tests.support.refusals import expect

Array = npt.NDArray[Any]

NAME = "distance_squared"
SHAPE = Shape(2, 40, 50, 4, 16, 24, 2)
STEP = 1e-5


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with distance_squared():
        yield


def problem_of(direction: str = "forward", shape: tuple[int, ...] = (4,), **changes: Any) -> Problem:
    """A problem with the term."""
    given = {"score_terms": ((NAME, Tensor.contiguous(shape, "float32")),)} | changes
    return Problem.dense(direction, SHAPE, "bfloat16", Causal()).replace(**given)


def drawn(seed: int = 0) -> tuple[Array, ...]:
    """float64 query (2, 5, 4, 3), key (2, 7, 2, 3), value (2, 7, 2, 2) and grad_output."""
    rng = np.random.default_rng(seed)
    shapes = (2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 2), (2, 5, 4, 2)
    return tuple(rng.standard_normal(shape) for shape in shapes)


SLOPES = np.array([[0.02, -0.05, 0.1, 0.0], [0.03, 0.01, -0.02, 0.07]], np.float32)


@pytest.mark.parametrize("mask", [Full(), Causal(), CausalBottomRight()], ids=lambda mask: mask.name)
@pytest.mark.parametrize("slopes", [SLOPES, SLOPES[0]], ids=["of each batch", "of all batches"])
def test_forward_is_the_formula(mask: Mask, slopes: Array) -> None:
    query, key, value = (tensor.astype(np.float32) for tensor in drawn()[:3])
    output, logsumexp = attention_forward(
        query, key, value, mask=mask, softcap=3.0, score_terms={NAME: slopes}, backend="reference"
    )
    i, j = np.arange(5)[:, None], np.arange(7)[None, :]
    for b, h in np.ndindex(2, 4):
        scores = 3.0 * np.tanh(query[b, :, h] @ key[b, :, h // 2].T / np.sqrt(3) / 3.0)
        scores = scores + np.broadcast_to(slopes, (2, 4))[b, h] * (i + 2.0 - j) ** 2
        weights = np.where(mask.materialise(5, 7), np.exp(scores), 0)
        total = weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(output[b, :, h], weights / total @ value[b, :, h // 2], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(logsumexp[b, h, :5], np.log(total[:, 0]), rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_finite_differences() -> None:
    from cutlass_py_attn.reference import numpy_reference

    *operands, grad_output = drawn()
    options: dict[str, Any] = {"mask": Causal()}
    options["score_mod"] = numpy_reference.ReferenceScoreMod(softcap=1.5, score_terms={NAME: SLOPES})
    output, logsumexp = numpy_reference.forward(*operands, **options)
    gradients = numpy_reference.backward(grad_output, *operands, output, logsumexp, **options)
    for tensor, gradient in zip(operands, gradients[:3], strict=True):
        for index in np.ndindex(tensor.shape):
            value, results = tensor[index], []
            for step in (STEP, -STEP):
                tensor[index] = value + step
                results.append((numpy_reference.forward(*operands, **options)[0] * grad_output).sum())
            tensor[index] = value
            assert gradient[index] == pytest.approx((results[0] - results[1]) / (2 * STEP), rel=1e-5, abs=1e-8)


def test_backward_of_the_public_function() -> None:
    query, key, value, grad_output = (tensor.astype(np.float32) for tensor in drawn())
    options: dict[str, Any] = {"score_terms": {NAME: SLOPES}, "backend": "reference"}
    output, logsumexp = attention_forward(query, key, value, **options)
    found = attention_backward(grad_output, query, key, value, output, logsumexp, **options)
    plain = attention_backward(grad_output, query, key, value, output, logsumexp, backend="reference")
    assert found.query.shape == query.shape
    assert abs(found.query - plain.query).max() > 1e-2


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_plan(direction: str, arch: str) -> None:
    plan = {"forward": plan_forward, "backward": plan_backward}[direction](problem_of(direction), arch)
    family = "sm90" if arch == "sm_90a" else "sm80"
    assert (plan.build.family, plan.build.features) == (family, (NAME, "grouped"))
    assert f"_causal_{NAME}_grouped_" in plan.symbol
    assert NAME in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan
    assert parse_symbol(plan.symbol, arch).build == plan.build


def test_no_decode_kernel_has_it() -> None:
    shape = Shape(2, 1, 4096, 4, 64, 64)
    problem = Problem.dense("forward", shape, "bfloat16")
    slopes = Tensor.contiguous((4,), "float32")
    assert plan_forward(problem, "sm_90").build.family == "decode"
    plan = plan_forward(problem.replace(score_terms=((NAME, slopes),)), "sm_90")
    assert plan.build.family == "sm80"
    assert f"a decode kernel takes no {NAME}" in plan.reason


def test_fields_come_behind_all_others() -> None:
    build = plan_forward(problem_of(), "sm_90").build
    fields = abi.fields_of(build)
    assert fields[: len(abi.FORWARD)] == abi.FORWARD
    assert fields[len(abi.FORWARD) :] == ((NAME, "i64"), (f"{NAME}_batch", "i64"))
    plain = plan_forward(problem_of(score_terms=()), "sm_90").build
    assert abi.fields_of(plain) == abi.FORWARD


@pytest.mark.parametrize(("shape", "batch"), [((4,), 0), ((2, 4), 4)])
def test_struct(shape: tuple[int, ...], batch: int) -> None:
    problem = problem_of(shape=shape)
    plan = plan_forward(problem, "sm_90")
    assert params.numbers(problem, problem.operands())[f"{NAME}_batch"] == batch
    assert params.alignments(problem, problem.operands())[NAME] == 16
    kernel_params = params.KernelParams(plan, problem)
    assert NAME in kernel_params.pointer_names
    described = numbers.pointers(problem)[NAME]
    assert tuple(map(str, described.shape)) == ("batch", "num_heads")[-len(shape) :]
    assert described.meaning == "slope of each head's squared distance"
    assert numbers.inputs(problem, plan.build)[f"{NAME}_batch"].value == batch


def test_json() -> None:
    problem = problem_of("backward", (2, 4))
    assert from_json(to_json(problem)) == problem
    assert "score_terms" not in to_json(problem.replace(score_terms=()))


@pytest.mark.parametrize(
    ("slopes", "expected"),
    [
        (Tensor.contiguous((3,), "float32"), f"{NAME}: must be float32 [4] or [2, 4]"),
        (Tensor.contiguous((4,), "float16"), f"{NAME}: must be float32 [4] or [2, 4]"),
        (Tensor((4,), (2,), "float32"), f"{NAME}.strides: must be contiguous"),
    ],
)
def test_operands_that_are_refused(slopes: Tensor, expected: str) -> None:
    expect(problem_of().replace(score_terms=((NAME, slopes),)).refusals(), [expected])


def test_a_problem_without_its_term_is_refused() -> None:
    problem = problem_of()
    build = plan_forward(problem, "sm_90").build
    score_terms.unregister(NAME)
    try:
        with pytest.raises(NotSupported, match="must be registered terms, of which there is none"):
            problem.check()
        for read in (abi.fields_of, registry.of_features, registry.source_digest):
            given: Any = build if read is abi.fields_of else build.features
            with pytest.raises(NotSupported, match=f"score terms {NAME}: must be registered before"):
                read(given)
        with pytest.raises(NotSupported, match="is not registered; registered terms are none"):
            score_terms.unregister(NAME)
    finally:
        score_terms.register(DistanceSquared())


class Valid(DistanceSquared):
    """A second term."""

    name: ClassVar[str] = "second"
    vector: ClassVar[VectorOperand | None] = VectorOperand("second", (("num_heads",),), "a factor")
    struct: ClassVar[StructFields] = StructFields(("second",))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"name": "Second term"}, "the name must be lower-case letters, digits and single underscores"),
    "name of another": ({"name": "softcap"}, "the name is taken"),
    "reserved name": ({"name": "varlen"}, "the name is taken"),
    "no vector": ({"vector": None}, "vector must be a VectorOperand of the same name"),
    "fields": ({"struct": StructFields()}, "struct.addresses lacks second"),
    "fields of others": ({"struct": StructFields(("second",), (), ("keep_scale",))}, "fields keep_scale belong to"),
    "field of Problem": ({"field": "sinks"}, "field and gradient must be empty"),
    "products": ({"scales_products": True}, "must add to the scores"),
    "derivative": ({"has_derivative": True}, "must add to the scores"),
    "kernels": ({"kernels": ("sm80 forward",)}, "kernels = ('sm80 forward',): no kernel reads it"),
    "tables": ({"tile_tables": ("narrow",)}, "tile_tables has narrow"),
}  # fmt: skip


@pytest.mark.parametrize(("attributes", "reason"), REFUSED.values(), ids=REFUSED)
def test_terms_that_are_refused(attributes: dict[str, Any], reason: str) -> None:
    made = type("Refused", (Valid,), attributes)()
    with pytest.raises(NotSupported) as caught:
        score_terms.register(made)
    assert any(reason in text for text in caught.value.reasons)
    assert made.name not in registry.registered()


def test_two_terms_at_once() -> None:
    score_terms.register(Valid())
    try:
        four = Tensor.contiguous((4,), "float32")
        problem = problem_of(score_terms=((NAME, four), ("second", four)))
        build = plan_forward(problem, "sm_90").build
        assert build.features == (NAME, "grouped", "second")
        assert [name for name, _ in abi.fields_of(build)[-3:]] == [NAME, f"{NAME}_batch", "second"]
        score_terms.register(score_terms.unregister(NAME))  # now the last one that was registered
        assert [name for name, _ in abi.fields_of(build)[-3:]] == [NAME, f"{NAME}_batch", "second"]
    finally:
        score_terms.unregister("second")


def test_a_field_of_the_kernels_is_refused() -> None:
    score_terms.register(type("Other", (Valid,), {"struct": StructFields(("second", "group"))})())
    try:
        problem = problem_of(score_terms=(("second", Tensor.contiguous((4,), "float32")),))
        build = plan_forward(problem, "sm_90").build
        with pytest.raises(NotSupported, match="the kernels have other fields group; rename them"):
            abi.fields_of(build)
    finally:
        score_terms.unregister("second")


def test_code_belongs_to_the_key_of_kernels() -> None:
    assert registry.source_digest(("alibi",)) == ""
    first = registry.source_digest((NAME,))
    assert first == registry.source_digest(("alibi", NAME))
    score_terms.unregister(NAME)
    changed = DistanceSquared()
    changed.power = 3  # type: ignore[attr-defined]
    score_terms.register(changed)
    assert registry.source_digest((NAME,)) not in ("", first)
