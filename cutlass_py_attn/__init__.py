"""Fused attention as bare GPU kernels: plan, compile anywhere, launch through the CUDA driver, no framework.

    from cutlass_py_attn import Causal, attention_backward, attention_forward

Importing this package loads neither the compiler nor the driver: each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutlass_py_attn.artifact import Artifact, Folder
    from cutlass_py_attn.attention import Gradients, attention_backward, attention_forward
    from cutlass_py_attn.bundle.files import Bundle, export_bundle, load_bundle
    from cutlass_py_attn.compiler import artifact_for, compile
    from cutlass_py_attn.errors import (
        AttentionError,
        CompileError,
        DoesNotFit,
        DriverError,
        NoDevice,
        NotSupported,
        Stale,
    )
    from cutlass_py_attn.launch import Bound, bind
    from cutlass_py_attn.masks import Causal, CausalBottomRight, Full, Window
    from cutlass_py_attn.options import VariableLength
    from cutlass_py_attn.philox import Dropout, dropout_mask
    from cutlass_py_attn.plan import Plan
    from cutlass_py_attn.planner import plan_backward, plan_forward
    from cutlass_py_attn.problem import Problem, Sequences, Shape, Tensor

__version__ = "0.1.0"

_HOME = {
    "artifact": ("Artifact", "Folder"),
    "attention": ("Gradients", "attention_backward", "attention_forward"),
    "bundle.files": ("Bundle", "export_bundle", "load_bundle"),
    "compiler": ("artifact_for", "compile"),
    "errors": (
        "AttentionError",
        "CompileError",
        "DoesNotFit",
        "DriverError",
        "NoDevice",
        "NotSupported",
        "Stale",
    ),
    "launch": ("Bound", "bind"),
    "masks": ("Causal", "CausalBottomRight", "Full", "Window"),
    "options": ("VariableLength",),
    "philox": ("Dropout", "dropout_mask"),
    "plan": ("Plan",),
    "planner": ("plan_backward", "plan_forward"),
    "problem": ("Problem", "Sequences", "Shape", "Tensor"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Artifact",
    "AttentionError",
    "Bound",
    "Bundle",
    "Causal",
    "CausalBottomRight",
    "CompileError",
    "DoesNotFit",
    "DriverError",
    "Dropout",
    "Folder",
    "Full",
    "Gradients",
    "NoDevice",
    "NotSupported",
    "Plan",
    "Problem",
    "Sequences",
    "Shape",
    "Stale",
    "Tensor",
    "VariableLength",
    "Window",
    "artifact_for",
    "attention_backward",
    "attention_forward",
    "bind",
    "compile",
    "dropout_mask",
    "export_bundle",
    "load_bundle",
    "plan_backward",
    "plan_forward",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
