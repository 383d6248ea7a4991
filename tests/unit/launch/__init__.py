"""Tests of cutlass_py_attn/launch/."""
