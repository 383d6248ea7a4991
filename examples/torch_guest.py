"""torch as a guest: its tensors are read in place on its current stream, and gradients go through torch.autograd."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from cutlass_py_attn import Causal, attention_backward, attention_forward


class Attention(torch.autograd.Function):
    """Causal attention for autograd: the forward's results are all that the backward needs."""

    @staticmethod
    def forward(context: Any, query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
        """The package refuses tensors that ask for gradients: it computes none by itself."""
        operands = [tensor.detach() for tensor in (query, key, value)]
        stream = torch.cuda.current_stream()
        output, logsumexp = attention_forward(*operands, mask=Causal(), stream=stream, **options)
        context.save_for_backward(*operands, output, logsumexp)
        context.options = options
        return output

    @staticmethod
    def backward(context: Any, grad_output: Any) -> tuple[Any, ...]:
        """On the stream on which autograd runs the backward."""
        saved = [tensor.detach() for tensor in context.saved_tensors]
        stream = torch.cuda.current_stream()
        found = attention_backward(grad_output.detach(), *saved, mask=Causal(), stream=stream, **context.options)
        return found.query, found.key, found.value, None


def main(**options: Any) -> float:
    """The largest difference of a gradient from the NumPy reference's."""
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
