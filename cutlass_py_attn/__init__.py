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
    from cutlass_py_attn.api.attention import attention_backward as attention_backward
    from cutlass_py_attn.api.attention import attention_forward as attention_forward
    from cutlass_py_attn.api.attention import mla_attention_forward as mla_attention_forward
    from cutlass_py_attn.api.dropout_mask import dropout_mask as dropout_mask
    from cutlass_py_attn.api.options import AttentionOptions as AttentionOptions
    from cutlass_py_attn.api.options import BackwardOptions as BackwardOptions
    from cutlass_py_attn.api.options import ForwardOptions as ForwardOptions
    from cutlass_py_attn.api.options import MlaOptions as MlaOptions
    from cutlass_py_attn.api.options import VariableLength as VariableLength
    from cutlass_py_attn.api.paged import Paged as Paged
    from cutlass_py_attn.api.quantization import quantize_e4m3 as quantize_e4m3
    from cutlass_py_attn.api.quantization import rotate_rows as rotate_rows
    from cutlass_py_attn.api.results import Gradients as Gradients
    from cutlass_py_attn.api.serving import append_to_cache as append_to_cache
    from cutlass_py_attn.api.serving import merge_states as merge_states
    from cutlass_py_attn.artifact import Artifact as Artifact
    from cutlass_py_attn.artifact import Folder as Folder
    from cutlass_py_attn.artifact import NoPermission as NoPermission
    from cutlass_py_attn.bundle.files import Bundle as Bundle
    from cutlass_py_attn.bundle.files import export_bundle as export_bundle
    from cutlass_py_attn.bundle.files import export_library as export_library
    from cutlass_py_attn.bundle.files import load_bundle as load_bundle
    from cutlass_py_attn.compilation.checked import artifact_for as artifact_for
    from cutlass_py_attn.compilation.checked import compile as compile
    from cutlass_py_attn.errors import AttentionError as AttentionError
    from cutlass_py_attn.errors import CompileError as CompileError
    from cutlass_py_attn.errors import DoesNotFit as DoesNotFit
    from cutlass_py_attn.errors import DriverError as DriverError
    from cutlass_py_attn.errors import NoDevice as NoDevice
    from cutlass_py_attn.errors import NotSupported as NotSupported
    from cutlass_py_attn.errors import Stale as Stale
    from cutlass_py_attn.kernels.score_function import ScoreFunction as ScoreFunction
    from cutlass_py_attn.launch.build import Build as Build
    from cutlass_py_attn.launch.tile_config import TileConfig as TileConfig
    from cutlass_py_attn.plan.append import plan_append as plan_append
    from cutlass_py_attn.plan.merge import plan_merge as plan_merge
    from cutlass_py_attn.plan.performance import PerformanceWarning as PerformanceWarning
    from cutlass_py_attn.plan.plan import Plan as Plan
    from cutlass_py_attn.plan.planner import plan_backward as plan_backward
    from cutlass_py_attn.plan.planner import plan_forward as plan_forward
    from cutlass_py_attn.plan.planner import plan_with_tile as plan_with_tile
    from cutlass_py_attn.problem.append import AppendProblem as AppendProblem
    from cutlass_py_attn.problem.block_sparse import BlockSparse as BlockSparse
    from cutlass_py_attn.problem.key_ranges import KeyRanges as KeyRanges
    from cutlass_py_attn.problem.mask_function import MaskFunction as MaskFunction
    from cutlass_py_attn.problem.masks import Causal as Causal
    from cutlass_py_attn.problem.masks import CausalBottomRight as CausalBottomRight
    from cutlass_py_attn.problem.masks import Full as Full
    from cutlass_py_attn.problem.masks import Mask as Mask
    from cutlass_py_attn.problem.masks import Window as Window
    from cutlass_py_attn.problem.merge import MergeProblem as MergeProblem
    from cutlass_py_attn.problem.paging import Pages as Pages
    from cutlass_py_attn.problem.problem import Problem as Problem
    from cutlass_py_attn.problem.tensors import Sequences as Sequences
    from cutlass_py_attn.problem.tensors import Shape as Shape
    from cutlass_py_attn.problem.tensors import Tensor as Tensor
    from cutlass_py_attn.runtime.binding import Bound as Bound
    from cutlass_py_attn.runtime.binding import bind as bind
    from cutlass_py_attn.runtime.driver import ForkedChild as ForkedChild
    from cutlass_py_attn.runtime.driver import OldDriver as OldDriver
    from cutlass_py_attn.score_terms.dropout import Dropout as Dropout

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
    "kernels.score_function": ("ScoreFunction",),
    "launch.build": ("Build",),
    "plan.merge": ("plan_merge",),
    "plan.performance": ("PerformanceWarning",),
    "plan.plan": ("Plan",),
    "plan.planner": ("plan_backward", "plan_forward", "plan_with_tile"),
    "launch.tile_config": ("TileConfig",),
    "problem.append": ("AppendProblem",),
    "problem.block_sparse": ("BlockSparse",),
    "problem.key_ranges": ("KeyRanges",),
    "problem.mask_function": ("MaskFunction",),
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
_SUBPACKAGES = ("jax", "torch_ops")  # attributes of this package as well
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
