"""Command line: one module for each command of `cutlass-py-attn`, and what they share."""
