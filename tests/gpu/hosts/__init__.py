"""Tests on the GPU of hosts and launchers, not of kernels."""
