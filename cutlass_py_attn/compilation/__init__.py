"""Compiles a Build to PTX and cubin with the CuTe DSL, on any machine; caches artifacts on disk."""
