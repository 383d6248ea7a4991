"""Kernels before and after the main kernel of a backward, and the gradients of bias and sinks."""
