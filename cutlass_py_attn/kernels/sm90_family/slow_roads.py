"""Slow roads: which builds the sm90 family would compute faster, and the one change with which it takes the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from cutlass_py_attn.kernels.problem_kind import NARROW_HEAD_DIM
from cutlass_py_attn.kernels.sm90_common.rules import SM90_MAX_HEAD_DIM
from cutlass_py_attn.kernels.sm90_family.choice import LEAST_PAGE_SIZE, kernel_of_dims
from cutlass_py_attn.kernels.sm90_forward import kernel as sm90_forward
from cutlass_py_attn.kernels.sm90_mla import kernel as sm90_mla
from cutlass_py_attn.kernels.sm90_wide import kernel as sm90_wide
from cutlass_py_attn.launch.build import Build
from cutlass_py_attn.launch.variants import MLA, MLA_HEAD_DIMS, STANDARD, TWO_CTA, WIDE
from cutlass_py_attn.problem.tensors import OPERANDS, ROW_ALIGNMENT_BYTES

HOPPER: Final = ("sm_90", "sm_90a")  # targets of GPUs that the family runs on; sm_90 is for other kernels


def _widest(build: Build) -> int:
    return max(build.head_dim, build.head_dim_value)


def _has_small_pages(sizes: Mapping[str, int]) -> bool:
    return sizes.get("page_size", LEAST_PAGE_SIZE) < LEAST_PAGE_SIZE


def takes(build: Build, sizes: Mapping[str, int], without: Collection[str] = ()) -> bool:
    """Returns whether the family has these features and head dims, on the GPUs of the target.

    sizes: of a call. without: features that are left out
    """
    kernel = kernel_of_dims(build.kind, build)
    if build.arch not in HOPPER or _widest(build) > sm90_wide.WIDE_MAX_HEAD_DIM:
        return False
    is_whole = build.kind == "forward" or {*OPERANDS} <= {*build.gradients}
    is_repeatable = build.deterministic and kernel.variant == TWO_CTA
    has_features = {*kernel.lacks(build)} <= {*without}
    return has_features and not _has_small_pages(sizes) and is_whole and not is_repeatable


def divides_tiles(build: Build) -> bool:
    """Returns whether several blocks of the family share one tile of these kernels, if there are few tiles."""
    if build.kind == "forward":
        has_features = not sm90_forward.SPLIT_KV_FORWARD.lacks(build)
        return _widest(build) <= SM90_MAX_HEAD_DIM and not build.form.has_left and has_features
    is_plain = build.form.sees_all and {*build.features} <= {"grouped", "sinks"} and not build.deterministic
    return is_plain and _widest(build) <= NARROW_HEAD_DIM


def one_feature_less(build: Build) -> tuple[str, list[str]]:
    """Returns the change, and the one feature that keeps an sm80 build from the family; "" if there is none."""
    missing = kernel_of_dims(build.kind, build).lacks(build)
    if build.family != "sm80" or len(missing) != 1 or build.arch not in HOPPER:
        return "", []
    return f"no {missing[0]}, which no sm90 kernel of these head dims takes", missing


def latent_cache(build: Build, sizes: Mapping[str, int]) -> str:
    """Returns the change to a latent cache that variant mla reads, for keys of its head dims; "" for others."""
    is_latent = (build.head_dim, build.head_dim_value) == MLA_HEAD_DIMS and build.kind == "forward"
    if not is_latent or build.variant == MLA or build.arch not in HOPPER or build.dtype == "float32":
        return ""
    missing = [name for name in sm90_mla.FORWARD.lacks(build) if name != "seqused"]
    if len(missing) > 1:
        return ""
    small = f" in pages of at least {LEAST_PAGE_SIZE} rows" if _has_small_pages(sizes) else ""
    return (
        f"a latent cache{small} whose value is the first {MLA_HEAD_DIMS[1]} columns of key, rows aligned to "
        f"{ROW_ALIGNMENT_BYTES} bytes{f' and no {missing[0]}' if missing else ''}: pass it to mla_attention_forward"
    )


def in_parts(build: Build) -> str:
    """Returns the one change with which blocks of the family share the keys of few query tiles; "" if it is none."""
    if build.family != "sm90" or build.variant not in (STANDARD, WIDE) or build.form.has_left:
        return ""
    changes = [f"no {name}" for name in sm90_forward.SPLIT_KV_FORWARD.lacks(build)]
    changes += [f"head dims up to {SM90_MAX_HEAD_DIM}"] if build.variant == WIDE else []
    return f"{changes[0]}: blocks then share the keys of these few query tiles" if len(changes) == 1 else ""
