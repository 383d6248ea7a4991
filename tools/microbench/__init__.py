"""Microbench: what one SM and all SMs of a Hopper GPU give, measured by kernels that do one thing each."""
