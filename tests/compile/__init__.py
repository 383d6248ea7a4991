"""Tests that compile kernels with the DSL and look at their machine code."""
