"""The words of a launch, which kernels and planner share: what is built, its parameters, sizes and entries."""
