"""Bench cuDNN through its frontend: forwards of e4m3 operands, pages and latent caches, which torch does not pass on.

The package nvidia-cudnn-frontend is no dependency: if it is not installed, it is no peer. It loads the cuDNN library
that torch has loaded. Each case has a graph of one attention, with the kernel that cuDNN chooses first.

On Hopper cuDNN writes e4m3 codes from e4m3 operands, where our kernels write 16 bits.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from cutlass_py_attn import extras
from cutlass_py_attn.errors import NotSupported
from cutlass_py_attn.problem.spec import ProblemSpec
from cutlass_py_attn.problem.tensors import FLOAT8, OPERANDS

DISTRIBUTION: Final = "nvidia-cudnn-frontend"
MODULE: Final = "cudnn"
DATA_TYPES: Final = {  # members of cudnn.data_type by the name of torch's dtype
    "bfloat16": "BFLOAT16",
    "float16": "HALF",
    "float32": "FLOAT",
    "int32": "INT32",
    FLOAT8: "FP8_E4M3",
}
# Of the operands, of the weights, whose largest is 1, and of the output, whose largest is that of the values.
SCALES: Final = {
    **dict.fromkeys(("descale_q", "descale_k", "descale_v"), 1.0),
    "scale_s": 256.0,
    "descale_s": 1 / 256,
    "scale_o": 64.0,
}


@dataclass(frozen=True, slots=True)
class FrontendCall:
    """A forward of cuDNN. tensors: what the graph reads and writes, by its own tensors."""

    cudnn: Any
    handle: Any
    graph: Any
    tensors: Mapping[Any, Any]
    workspace: Any
    output: Any
    stream: Callable[[], int]
    backend: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def forward(self) -> Any:
        """Returns the output, (batch, heads, rows, columns); every call writes the same memory."""
        self.cudnn.set_stream(handle=self.handle, stream=self.stream())
        self.graph.execute(self.tensors, self.workspace, handle=self.handle)
        return self.output

    def backward(self, forwarded: Any) -> Any:
        """NotSupported: the cases of this peer have none."""
        raise NotSupported(f"{DISTRIBUTION}: the benchmark calls only its forward; measure the direction forward")


def is_installed() -> bool:
    """Whether the package is installed; does not import it."""
    return bool(version())


def version() -> str:
    """Returns the version of the package; "" if it is not installed."""
    return extras.version(DISTRIBUTION)


def takes(case: ProblemSpec) -> bool:
    """Whether `prepare` has an argument for everything in the case; a build shows whether cuDNN has the kernel.

    Dense operands of 16 bits are not taken: torch passes them to cuDNN. Codes have no scales, or they have other ones
    than the graph's, which are of whole tensors.
    """
    has_other_term = bool(case.bias or case.alibi or case.dropout_p or case.softcap or case.sinks)
    is_cache = bool(case.page_size or case.value_in_key)
    has_layout = (is_cache and not case.has_codes) or (case.dtype == FLOAT8 and not is_cache)
    is_known = case.dtype in DATA_TYPES and case.dtype != "float32" and not case.descale and not case.float16_output
    has_form = not case.mask.form.has_left and not case.has_ragged_queries
    return has_layout and is_known and has_form and not (has_other_term or case.has_array_mask)


def prepare(torch: Any, case: ProblemSpec, given: Mapping[str, Any]) -> FrontendCall:
    """Returns the call of a case. given: torch tensors by name, integers with the bits of int32.

    NotSupported: the package has loaded another cuDNN than torch. cuDNN raises errors of its own if it has no kernel.
    """
    cudnn: Any = importlib.import_module(MODULE)
    if cudnn.backend_version() != torch.backends.cudnn.version():
        raise NotSupported(
            f"{DISTRIBUTION} {version()} has loaded cuDNN {cudnn.backend_version()} and torch "
            f"{torch.backends.cudnn.version()}: must be one library; remove the other from LD_LIBRARY_PATH"
        )
    handle = _handle(cudnn)
    operands, float32 = getattr(cudnn.data_type, DATA_TYPES[case.dtype]), cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=operands, intermediate_data_type=float32, compute_data_type=float32, handle=handle
    )
    attention = _Attention(torch, cudnn, graph, {})
    output = attention.e4m3(case, given) if case.dtype == FLOAT8 else attention.of_16_bits(case, given)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")

    def stream() -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    return FrontendCall(cudnn, handle, graph, attention.tensors, workspace, output, stream)


@functools.cache
def _handle(cudnn: Any) -> Any:
    """The handle of all graphs."""
    return cudnn.create_handle()


@dataclass(frozen=True, slots=True)
class _Attention:
    """One attention in a graph; `tensors` gets torch's tensors by the graph's. Axes: (batch, heads, rows, columns)."""

    torch: Any
    cudnn: Any
    graph: Any
    tensors: dict[Any, Any]

    def e4m3(self, case: ProblemSpec, given: Mapping[str, Any]) -> Any:
        """Adds the attention of e4m3 operands; returns its output, of e4m3 codes."""
        scales = {name: self._read(self._filled((1, 1, 1, 1), value, "float32")) for name, value in SCALES.items()}
        output, _, *largest = self.graph.sdpa_fp8(**self._options(case, given), **scales)
        for each in largest:
            self._write(each, self._filled((1, 1, 1, 1), 0, "float32"))
        return self._write(output, self._output(case))

    def of_16_bits(self, case: ProblemSpec, given: Mapping[str, Any]) -> Any:
        """Adds the attention of 16 bits, of pages if the case has them; returns its output."""
        output, _ = self.graph.sdpa(**self._options(case, given), **self._pages(case, given))
        return self._write(output, self._output(case))

    def _options(self, case: ProblemSpec, given: Mapping[str, Any]) -> dict[str, Any]:
        """What both attentions have; pools are (pages, heads, rows, columns)."""
        tensors = {name[0]: given[name].transpose(1, 2) for name in OPERANDS}
        if case.value_in_key:
            tensors["v"] = tensors["v"][..., : case.head_dim_value]
        is_causal = case.mask.form.grows
        at_bottom_right = is_causal and case.mask.bottom_right
        return {
            **{name: self._read(tensor) for name, tensor in tensors.items()},
            "attn_scale": 1 / math.sqrt(case.head_dim) if case.scale is None else float(case.scale),
            "generate_stats": False,
            "use_causal_mask": is_causal and not at_bottom_right,
            "use_causal_mask_bottom_right": at_bottom_right,
        }

    def _pages(self, case: ProblemSpec, given: Mapping[str, Any]) -> dict[str, Any]:
        if not case.page_size:
            return {}
        lengths, of_length = (case.batch, 1, 1, 1), self.torch.int32
        table = given["page_table"].view(of_length).view(case.batch, 1, case.max_pages, 1)
        return {
            "use_padding_mask": True,
            "seq_len_q": self._read(self._filled(lengths, case.num_queries, "int32")),
            "seq_len_kv": self._read(given["seqused_k"].view(of_length).view(*lengths)),
            "paged_attention_k_table": self._read(table),
            "paged_attention_v_table": self._read(table),
            "paged_attention_max_seq_len_kv": case.num_keys,
        }

    def _output(self, case: ProblemSpec) -> Any:
        """Memory for the output, in the layout of ours."""
        shape = case.batch, case.num_queries, case.num_heads, case.head_dim_value
        return self.torch.empty(shape, dtype=getattr(self.torch, case.dtype), device="cuda").transpose(1, 2)

    def _filled(self, shape: tuple[int, ...], value: float, dtype: str) -> Any:
        return self.torch.full(shape, value, dtype=getattr(self.torch, dtype), device="cuda")

    def _read(self, tensor: Any) -> Any:
        """Returns the graph's tensor of an operand."""
        sizes, strides = list(tensor.shape), list(tensor.stride())
        found = self.graph.tensor(dim=sizes, stride=strides, data_type=self._data_type(tensor))
        self.tensors[found] = tensor
        return found

    def _write(self, node: Any, tensor: Any) -> Any:
        """Makes the graph's tensor an output that is written to `tensor`, which it returns."""
        node.set_output(True).set_dim(list(tensor.shape)).set_stride(list(tensor.stride()))
        node.set_data_type(self._data_type(tensor))
        self.tensors[node] = tensor
        return tensor

    def _data_type(self, tensor: Any) -> Any:
        return getattr(self.cudnn.data_type, DATA_TYPES[str(tensor.dtype).removeprefix("torch.")])
