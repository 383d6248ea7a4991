"""Parts the fused kernels are made of: integers, schedule, masking, softmax, moves."""
