"""The two attention functions: options, validation, prepared calls, launch, and the CPU backend."""
