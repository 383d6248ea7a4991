"""Tests: tests/gpu needs a GPU; all others run on any machine."""
