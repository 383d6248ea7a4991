"""Tests of the GPU suite itself, on machines without a GPU."""
