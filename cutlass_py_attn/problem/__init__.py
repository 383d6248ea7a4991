"""What to compute: shapes, strides, masks and score terms of one attention pass; no device and no plan."""
