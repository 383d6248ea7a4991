"""Tests of cutlass_py_attn/torch_ops/."""
