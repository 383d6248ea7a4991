"""Kernels that compute row by row: appends to caches and merges of partial results."""
