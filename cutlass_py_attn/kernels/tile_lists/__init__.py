"""Tile lists: the kernels before a fused kernel of mask form "ranges"."""
