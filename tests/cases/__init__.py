"""Lists of cases, random cases and smaller ones, shared by tests and tools; no wheel has them."""
