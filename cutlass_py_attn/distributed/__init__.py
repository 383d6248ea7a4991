"""Context parallelism without JAX: attention whose rows are split over processes, one for each GPU, over NCCL.

    from cutlass_py_attn import Causal, distributed

    group = distributed.connect(rank, size, "host:29500")
    rows = distributed.rows_of_rank(rank, size, num_rows, load_balance="zigzag")
    output, logsumexp = distributed.attention_forward(query, key, value, group=group, context_strategy="ring",
                                                      load_balance="zigzag", mask=Causal())

docs/several_gpus.md and docs/distributed.md say what each strategy computes, moves and needs.
"""

from __future__ import annotations

from cutlass_py_attn.distributed.attention import (
    ContextBackwardOptions,
    ContextOptions,
    attention_backward,
    attention_forward,
)
from cutlass_py_attn.distributed.communicator import Communicator, PeerLost
from cutlass_py_attn.distributed.connection import connect, rows_of_rank
from cutlass_py_attn.distributed.group import Group
from cutlass_py_attn.distributed.nccl import NcclCommunicator

__all__ = [
    "Communicator",
    "ContextBackwardOptions",
    "ContextOptions",
    "Group",
    "NcclCommunicator",
    "PeerLost",
    "attention_backward",
    "attention_forward",
    "connect",
    "rows_of_rank",
]
