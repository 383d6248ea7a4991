"""Microbenchmarks: throughput of single operations on one SM and on all SMs of a Hopper GPU."""
