"""Fused attention as bare GPU kernels: compiled on any machine, launched by the CUDA driver, without a framework.

    from cutlass_py_attn import Causal, attention_backward, attention_forward

Importing this package loads neither the compiler nor the driver: a public name is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutlass_py_attn import jax as jax
    from cutlass_py_attn import torch_ops as torch_ops
    from cutlass_py_attn.api.attention import attention_backward, attention_forward, mla_attention_forward
    from cutlass_py_attn.api.dropout_mask import dropout_mask
    from cutlass_py_attn.api.options import (
        AttentionOptions,
        BackwardOptions,
        ForwardOptions,
        MlaOptions,
        VariableLength,
    )
    from cutlass_py_attn.api.paged import Paged
    from cutlass_py_attn.api.quantization import quantize_e4m3, rotate_rows
    from cutlass_py_attn.api.results import Gradients
    from cutlass_py_attn.api.serving import append_to_cache, merge_states
    from cutlass_py_attn.artifact import Artifact, Folder, NoPermission
    from cutlass_py_attn.bundle.files import Bundle, export_bundle, export_library, load_bundle
    from cutlass_py_attn.compilation.checked import artifact_for, compile
    from cutlass_py_attn.errors import (
        AttentionError,
        CompileError,
        DoesNotFit,
        DriverError,
        NoDevice,
        NotSupported,
        Stale,
    )
    from cutlass_py_attn.launch.build import Build
    from cutlass_py_attn.launch.tile_config import TileConfig
    from cutlass_py_attn.plan.append import plan_append
    from cutlass_py_attn.plan.merge import plan_merge
    from cutlass_py_attn.plan.performance import PerformanceWarning
    from cutlass_py_attn.plan.plan import Plan
    from cutlass_py_attn.plan.planner import plan_backward, plan_forward, plan_with_tile
    from cutlass_py_attn.problem.append import AppendProblem
    from cutlass_py_attn.problem.masks import Causal, CausalBottomRight, Full, Mask, Window
    from cutlass_py_attn.problem.merge import MergeProblem
    from cutlass_py_attn.problem.paging import Pages
    from cutlass_py_attn.problem.problem import Problem
    from cutlass_py_attn.problem.tensors import Sequences, Shape, Tensor
    from cutlass_py_attn.runtime.binding import Bound, bind
    from cutlass_py_attn.runtime.driver import ForkedChild, OldDriver
    from cutlass_py_attn.score_terms.dropout import Dropout

    conventions = torch_ops

__version__ = "0.1.0"

_PUBLIC_NAMES = {
    "api.attention": ("attention_backward", "attention_forward", "mla_attention_forward"),
    "api.dropout_mask": ("dropout_mask",),
    "api.options": ("AttentionOptions", "BackwardOptions", "ForwardOptions", "MlaOptions", "VariableLength"),
    "api.paged": ("Paged",),
    "api.quantization": ("quantize_e4m3", "rotate_rows"),
    "api.results": ("Gradients",),
    "api.serving": ("append_to_cache", "merge_states"),
    "artifact": ("Artifact", "Folder", "NoPermission"),
    "bundle.files": ("Bundle", "export_bundle", "export_library", "load_bundle"),
    "compilation.checked": ("artifact_for", "compile"),
    "errors": ("AttentionError", "CompileError", "DoesNotFit", "DriverError", "NoDevice", "NotSupported", "Stale"),
    "plan.append": ("plan_append",),
    "launch.build": ("Build",),
    "plan.merge": ("plan_merge",),
    "plan.performance": ("PerformanceWarning",),
    "plan.plan": ("Plan",),
    "plan.planner": ("plan_backward", "plan_forward", "plan_with_tile"),
    "launch.tile_config": ("TileConfig",),
    "problem.append": ("AppendProblem",),
    "problem.masks": ("Causal", "CausalBottomRight", "Full", "Mask", "Window"),
    "problem.merge": ("MergeProblem",),
    "problem.paging": ("Pages",),
    "problem.problem": ("Problem",),
    "problem.tensors": ("Sequences", "Shape", "Tensor"),
    "runtime.driver": ("ForkedChild", "OldDriver"),
    "runtime.binding": ("Bound", "bind"),
    "score_terms.dropout": ("Dropout",),
}
_MODULE_OF = {name: module for module, names in _PUBLIC_NAMES.items() for name in names}
# Subpackages that are attributes of this package as well. `conventions` is the former name of `torch_ops`.
_SUBPACKAGES = {"conventions": "torch_ops", "jax": "jax", "torch_ops": "torch_ops"}

__all__ = [
    "AppendProblem",
    "Artifact",
    "AttentionError",
    "AttentionOptions",
    "BackwardOptions",
    "Bound",
    "Build",
    "Bundle",
    "Causal",
    "CausalBottomRight",
    "CompileError",
    "DoesNotFit",
    "DriverError",
    "Dropout",
    "Folder",
    "ForkedChild",
    "ForwardOptions",
    "Full",
    "Gradients",
    "Mask",
    "MergeProblem",
    "MlaOptions",
    "NoDevice",
    "NoPermission",
    "NotSupported",
    "OldDriver",
    "Paged",
    "Pages",
    "PerformanceWarning",
    "Plan",
    "Problem",
    "Sequences",
    "Shape",
    "Stale",
    "Tensor",
    "TileConfig",
    "VariableLength",
    "Window",
    "append_to_cache",
    "artifact_for",
    "attention_backward",
    "attention_forward",
    "bind",
    "compile",
    "dropout_mask",
    "export_bundle",
    "export_library",
    "load_bundle",
    "merge_states",
    "mla_attention_forward",
    "plan_append",
    "plan_backward",
    "plan_forward",
    "plan_merge",
    "plan_with_tile",
    "quantize_e4m3",
    "rotate_rows",
]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{_SUBPACKAGES[name]}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
