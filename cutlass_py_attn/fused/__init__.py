"""Fused kernels: the forward and the backward, each made of the five rooms."""
