"""Launches the kernels of an Artifact at device addresses through the CUDA driver. Never imports the DSL."""
