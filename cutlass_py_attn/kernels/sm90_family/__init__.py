"""The sm90 family: which of its kernels computes a problem, with which tile and options."""
