"""Tests of tests/cases/."""
