"""The CuTe DSL kernels by architecture, and the five component GEMMs that they are made of."""
