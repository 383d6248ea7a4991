"""Tests on a GPU; their cases and checks are in cutlass_py_attn/testing."""
