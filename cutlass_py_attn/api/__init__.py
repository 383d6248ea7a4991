"""The two attention functions: options, validation, call cache, launch, and the CPU backend."""
