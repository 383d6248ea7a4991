"""Tests on the GPU that judge hosts, not kernels: no record of a kernel depends on them."""
