"""sm90 forward and backward of head dims beyond 256."""
