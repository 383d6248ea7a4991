"""Symbols: maps the name of a kernel, or of an entry of its cubin, to its plan."""

from __future__ import annotations

import re
from dataclasses import replace

from cutlass_py_attn.cli import catalogue
from cutlass_py_attn.cli.choices import Choices
from cutlass_py_attn.cli.selection import DTYPES
from cutlass_py_attn.cli.target import plans_for
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.integers import ceil_div
from cutlass_py_attn.kernels.catalogue import KERNELS
from cutlass_py_attn.kernels.component_gemms import COMPONENT_GEMMS
from cutlass_py_attn.kernels.decode.kernel import MIN_KEYS
from cutlass_py_attn.kernels.decode.layout import MAX_QUERIES
from cutlass_py_attn.kernels.rows.kernel import APPEND
from cutlass_py_attn.kernels.sm90_family.tile_time import LONG_LENGTH, MULTICAST_LENGTH
from cutlass_py_attn.launch.abi import FLOAT32_OUTPUTS
from cutlass_py_attn.launch.arch import architecture
from cutlass_py_attn.launch.variants import E4M3, E4M3_ROW, E4M3_TILE, LAST, MLA, STANDARD, SUM, SUM_LAST, TOTAL
from cutlass_py_attn.plan import planner
from cutlass_py_attn.plan.append import SCALES_OF
from cutlass_py_attn.plan.component_gemms import plan_component_gemm
from cutlass_py_attn.plan.plan import Plan
from cutlass_py_attn.problem import masks
from cutlass_py_attn.problem.append import AppendProblem
from cutlass_py_attn.problem.masks import Full
from cutlass_py_attn.problem.merge import MergeProblem
from cutlass_py_attn.problem.problem import Problem
from cutlass_py_attn.problem.spec import GRADIENTS, ProblemSpec, SequenceLengths
from cutlass_py_attn.problem.tensors import OPERAND_NAMES, ROW_ALIGNMENT_BYTES, Tensor
from cutlass_py_attn.score_terms import registry
from cutlass_py_attn.suggestions import did_you_mean

MASKS = {"full": Full(), "causal": masks.Causal(), "local": masks.Causal(window_size=1)}

# Sizes and numbers that a Problem needs but that decide no machine code. A sum over an axis needs a size above 1.
_BATCH, _HEADS, _GROUP, _LENGTH = 2, 2, 2, LONG_LENGTH
_PAGE_SIZE = 16
_SHORT_LENGTH = 128  # the plans of which have every tile, those for short sequences included
_DROPOUT_P, _SOFTCAP = 0.5, 1.0

_OPERANDS = {short: name for name, short in OPERAND_NAMES.items()}
_FAMILY_DTYPE = rf"(?P<family>[a-z0-9]+)_(?P<dtype>{'|'.join(DTYPES)})"
_TILE = r"(?:_(?P<tile_m>\d+)x(?P<tile_n>\d+))?"
_FORMS = "|".join((*MASKS, masks.RANGES))
_VARIANTS = sorted({variant for _, _, variant in KERNELS if variant})
_DIMS = r"d(?P<dim>\d+)(?:v(?P<dim_value>\d+))?"
# FEATURES stands for the layouts and the score terms, of which a user may register more.
_FUSED = (
    rf"(?P<kind>fwd|bwd)_(?P<family>[a-z0-9]+)_(?P<dtype>{'|'.join(_OPERANDS)})_{_DIMS}_(?P<mask>{_FORMS})(?P<features>(?:_(?:FEATURES))*)"
    r"(?:_to_(?P<gradients>[qkvbs]+))?(?:_a(?P<access>\d+))?(?:_ba(?P<bias>\d+))?(?:_ga(?P<grad_bias>\d+))?"
    rf"(?:_sum_(?P<summed>none|[bhqk]+))?(?P<det>_det)?(?:_(?P<variant>{'|'.join(_VARIANTS)}))?{_TILE}"
)
_COMPONENT_GEMM = re.compile(rf"(?P<component_gemm>{'|'.join(COMPONENT_GEMMS)})_{_FAMILY_DTYPE}_{_DIMS}{_TILE}")
_ROW_KERNEL = re.compile(
    rf"(?P<kind>append|merge)_{APPEND.family}_(?P<dtype>{'|'.join(DTYPES)})_{_DIMS}(?P<varlen>_varlen)?(?:_a(?P<access>\d+))?"
    rf"(?:_(?P<variant>{E4M3_ROW}|{E4M3_TILE}|{E4M3}|{TOTAL}|{LAST}|{SUM_LAST}|{SUM}))?{_TILE}"
)
# The main entry, if there is one, is number 0; the entries of the gradients of bias and sinks, and of lists of tiles,
# have later numbers.
_ENTRY = re.compile(r"(?:_delta_\d+|_finish(?:_kv)?_\d+|_combine_1|_(?:bias|sinks|ranges|lists|order)_[1-9]\d*|_0)$")

_DIGEST = re.compile(rf"_{masks.RANGES}_([0-9a-f]{{8}})(?:_|$)")


def parse_symbol(symbol: str, arch: str) -> Plan:
    """Returns the plan of a kernel's symbol, or of an entry's, on `arch`; NotSupported says what is wrong."""
    if digest := _DIGEST.search(symbol):
        raise NotSupported(
            f"symbol {symbol!r}: {digest[1]} stands for a mask function, which no symbol tells; plan a problem with "
            "the function in Python, and inspect what `artifact_for` returns for the plan's build"
        )
    stem = _ENTRY.sub("", symbol)
    plan = _component_gemm_of(stem, arch) or _row_kernel_of(stem, arch) or _fused_of(stem, arch)
    if plan is None:
        raise NotSupported(
            f"symbol {symbol!r}: must be like fwd_sm80_bf16_d128_causal, bwd_sm80_f16_d64v32_full_det "
            f"or append_sm80_bf16_d128; {_nearest(stem, arch)}`cutlass-py-attn list` shows the names"
        )
    if stem not in (plan.symbol, plan.build.stem):
        raise NotSupported(f"symbol {symbol!r}: on {arch} the planner selects {plan.symbol} instead; use that symbol")
    return plan


def _nearest(stem: str, arch: str) -> str:
    """Returns a question with the nearest symbols of the catalogue, in which d128 may be the head dims of `stem`."""
    dims = re.search(rf"_{_DIMS}(?=_|$)", stem)
    names = {entry.stem for entry in catalogue.entries(arch)}
    names |= {name.replace("_d128", dims[0]) for name in names if dims}
    suggestion = did_you_mean(catalogue.TILE_SUFFIX.sub("", stem), sorted(names))
    return f"{suggestion} " if suggestion else ""


def _component_gemm_of(stem: str, arch: str) -> Plan | None:
    found = _COMPONENT_GEMM.fullmatch(stem)
    if found is None:
        return None
    return plan_component_gemm(
        found["component_gemm"], found["family"], DTYPES[found["dtype"]], int(found["dim"]), arch
    )


def _row_kernel_of(stem: str, arch: str) -> Plan | None:
    found = _ROW_KERNEL.fullmatch(stem)
    if found is None:
        return None
    dtype, columns = DTYPES[found["dtype"]], int(found["dim"])
    alignment = int(found["access"] or ROW_ALIGNMENT_BYTES)
    if found["kind"] == "merge":
        shape = _LENGTH, _HEADS, columns
        packed, dense = MergeProblem.packed(1, _LENGTH, shape, dtype), MergeProblem.dense((1, *shape), dtype)
        merged = packed if found["varlen"] else dense
        variant = found["variant"] or STANDARD
        if variant not in FLOAT32_OUTPUTS:
            return None
        wide = {name: replace(getattr(merged, name), dtype="float32") for name in FLOAT32_OUTPUTS[variant]}
        if variant in (SUM, SUM_LAST):
            wide |= {"logsumexp_a": None, "logsumexp_b": None, "cu_seqlens_q": None, "max_seqlen_q": None}
        part = replace(merged.output_b, alignment=alignment)
        return plans_for(replace(merged, output_b=part, **wide), arch)[0]
    if found["variant"] not in (None, *SCALES_OF):
        return None
    scales, columns_value = SCALES_OF[found["variant"] or STANDARD], int(found["dim_value"] or 0)
    sizes = (_LENGTH, _HEADS, columns), (1, _LENGTH)
    appended = AppendProblem.dense(*sizes, dtype, head_dim_value=columns_value, scales=scales)
    return plans_for(replace(appended, key=replace(appended.key, alignment=alignment)), arch)[0]


def _fused_of(stem: str, arch: str) -> Plan | None:
    found = re.fullmatch(_FUSED.replace("FEATURES", _feature_pattern()), stem)
    if found is None:
        return None
    spec = _spec(found)
    features = {"bias": spec.bias, "sinks": spec.sinks}
    missing = [name for letter, name in GRADIENTS.items() if letter in spec.gradients and not features.get(name, True)]
    if missing:
        raise NotSupported(
            f"symbol {stem!r}: names the gradient of {', '.join(missing)}, but not the feature; name both"
        )
    problem = spec.problem("forward" if found["kind"] == "fwd" else "backward")
    changes = {"query": _aligned(problem.query.shape, spec.dtype, found["access"])}
    if problem.bias is not None:
        changes["bias"] = _aligned(problem.bias.shape, spec.dtype, found["bias"])
    if problem.grad_bias is not None:
        axes = zip("bhqk", spec.shape.bias, strict=True)
        summed = (found["summed"] or "").replace("none", "")
        sizes = tuple(1 if letter in summed else size for letter, size in axes)
        changes["grad_bias"] = _aligned(sizes, spec.dtype, found["grad_bias"])
    score_terms = tuple(
        (name, Tensor.contiguous(shape, "float32"))
        for term in registry.registered_among(_features(found))
        for name, shape in term.example(spec.shape).items()
    )
    return _of_family(problem.replace(**changes, score_terms=score_terms), arch, found)


def _of_family(problem: Problem, arch: str, found: re.Match[str]) -> Plan:
    """Returns the plan of the symbol's family, variant and tile (if named); the best plan if there is no such build.

    problem: one that the family takes, of whatever sizes: every build for it is tried, not only the best for its sizes
    """
    problem.check()
    choices, wanted = Choices(problem, arch), (found["family"], found["variant"] or STANDARD)
    tile = found["tile_m"] and (int(found["tile_m"]), int(found["tile_n"]))
    builds = choices.of_family(found["family"]) if tile else choices.in_order(problem)
    chosen = (
        build
        for build in builds
        if (build.family, build.variant) == wanted and (not tile or (build.tile_m, build.tile_n) == tile)
    )
    build = next(chosen, None) or choices.best(problem)
    return planner.plan_of_build(problem, build, architecture(arch).num_sms)


def _feature_pattern() -> str:
    """Returns the alternatives of a feature in a symbol; score terms may be registered at any time."""
    return "|".join((*registry.LAYOUTS, *registry.OPTIONAL_LAYOUTS, *registry.names()))


def _features(found: re.Match[str]) -> list[str]:
    """Returns the layouts and score terms that a symbol names."""
    return re.findall(_feature_pattern(), found["features"])


def _spec(found: re.Match[str]) -> ProblemSpec:
    """Returns a problem with the dtype, head dims, mask, features and gradients of a symbol."""
    has = set(_features(found)).__contains__
    # A decode kernel serves few query rows (queries times heads of a group).
    rows = int(found["tile_m"] or 16) if found["family"] == "decode" else 0
    group = max(_GROUP, ceil_div(rows, MAX_QUERIES)) if has("grouped") else 1
    direction = "forward" if found["kind"] == "fwd" else "backward"
    body = KERNELS.get((direction, found["family"], found["variant"] or ""))
    lengths = body.lengths if body is not None else "any"
    any_length = _SHORT_LENGTH if found["tile_m"] else _LENGTH
    length = {"long": MULTICAST_LENGTH, "any": any_length}.get(lengths, _SHORT_LENGTH)
    sees_all = lengths == "few_queries"  # of many keys, under a causal mask too
    queries, keys = (rows // group, MIN_KEYS) if rows else (length, _LENGTH if sees_all else length)
    sequence = SequenceLengths(queries, keys, keys if has("seqused") else None)
    sequences = (sequence,) * _BATCH if has("varlen") else ()
    if has("varlen") and has(registry.PAGED):  # pages with the same number of queries for all are batched queries
        sequences = (*sequences, SequenceLengths(queries - 1, keys))
    gradients = found["gradients"] or "qkv"
    return ProblemSpec(
        _OPERANDS[found["dtype"]],
        int(found["dim"]),
        num_queries=queries,
        num_keys=keys,
        batch=_BATCH,
        num_heads=_HEADS * group,
        head_dim_value=int(found["dim_value"] or 0),
        num_heads_key=_HEADS,
        mask=masks.CausalBottomRight() if sees_all and found["mask"] == "causal" else MASKS.get(found["mask"], Full()),
        sequences=sequences,
        ranges="11" if found["mask"] == masks.RANGES else "",
        bias="bhqk" if has("bias") else "",
        bias_gradient="grad" if "b" in gradients else "",
        gradients=gradients,
        dropout_p=_DROPOUT_P if has("dropout") else 0.0,
        softcap=_SOFTCAP if has("softcap") else 0.0,
        alibi="h" if has("alibi") else "",
        sinks=has("sinks"),
        deterministic=found["det"] is not None,
        page_size=_PAGE_SIZE if has(registry.PAGED) else 0,
        value_in_key=found["variant"] == MLA,
        e4m3_cache=has(registry.KV8),
        descale="tile" if has(registry.KV8_TILE) else "row" if has(registry.KV8_ROW) else "",
        float16_output=has(registry.FLOAT16_OUTPUT),
    )


def _aligned(shape: tuple[int, ...], dtype: str, access: str | None) -> Tensor:
    """Returns a contiguous tensor whose alignment allows this access and no wider one."""
    dense = Tensor.contiguous(shape, dtype)
    return Tensor(dense.shape, dense.strides, dtype, int(access or ROW_ALIGNMENT_BYTES))
