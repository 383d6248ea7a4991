"""Benchmark cases, timing, peers and the harness."""
