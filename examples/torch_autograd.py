"""torch: tensors are read in place on torch's current stream; a torch.autograd.Function computes the gradients."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from cutlass_py_attn import Causal, attention_backward, attention_forward


class Attention(torch.autograd.Function):
    """Causal attention for autograd: the backward needs the operands and results of the forward only."""

    @staticmethod
    def forward(context: Any, query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
        """Runs the forward. The package refuses tensors with requires_grad, since it records no autograd graph."""
        operands = [tensor.detach() for tensor in (query, key, value)]
        stream = torch.cuda.current_stream()
        output, logsumexp = attention_forward(*operands, mask=Causal(), stream=stream, **options)
        context.save_for_backward(*operands, output, logsumexp)
        context.options = options
        return output

    @staticmethod
    def backward(context: Any, grad_output: Any) -> tuple[Any, ...]:
        """Runs the backward on the stream that autograd has made current."""
        saved = [tensor.detach() for tensor in context.saved_tensors]
        stream = torch.cuda.current_stream()
        found = attention_backward(grad_output.detach(), *saved, mask=Causal(), stream=stream, **context.options)
        return found.query, found.key, found.value, None


def main(**options: Any) -> float:
    """Returns the largest difference of a gradient from the NumPy reference."""
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (torch.randn(2, 300, 4, 64, device="cuda", generator=generator) for _ in range(3))
    operands = [tensor.requires_grad_() for tensor in (query, key, value)]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        output = Attention.apply(*operands, options)
        output.square().sum().backward()
    torch.cuda.synchronize()
    host = [tensor.detach().cpu().numpy() for tensor in operands]
    expected, logsumexp = attention_forward(*host, mask=Causal(), backend="reference")
    reference = attention_backward(2 * expected, *host, expected, logsumexp, mask=Causal(), backend="reference")
    return max(
        float(np.abs(tensor.grad.cpu().numpy() - getattr(reference, name)).max())
        for name, tensor in zip(("query", "key", "value"), operands, strict=True)
    )


if __name__ == "__main__":
    sys.stdout.write(f"largest difference from the reference: {main():.1e}\n")
