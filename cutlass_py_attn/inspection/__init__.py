"""What one kernel was compiled to: texts with their numbered steps, resources, maps, and the difference of two."""
