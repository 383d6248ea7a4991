"""Tests of cutlass_py_attn.distributed, without NCCL and without a GPU."""
