"""Tests on the GPU of sequences longer than what a kernel prepares at once; no record of a kernel depends on them."""
