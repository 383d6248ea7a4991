"""Tests: tests/cpu needs no GPU, tests/gpu needs one and is a package that tools import as well."""
