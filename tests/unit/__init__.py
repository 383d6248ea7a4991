"""Tests of one module each, in folders named like those of the package."""
