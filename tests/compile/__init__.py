"""Tests that compile: kernels with the DSL, C headers with gcc, programs of JAX with XLA."""
