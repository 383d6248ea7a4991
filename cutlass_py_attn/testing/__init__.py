"""What a case is, its inputs, accuracy rules and checks of the kernels: for `run`, tools and tests."""
