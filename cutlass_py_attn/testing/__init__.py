"""Test cases, inputs, accuracy rules and checks of the kernels, shared by tools/ and tests/."""
