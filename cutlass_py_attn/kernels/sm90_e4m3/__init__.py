"""sm90 forward of e4m3 operands."""
