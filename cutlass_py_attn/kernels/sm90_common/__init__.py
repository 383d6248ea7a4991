"""What the kernels of the sm90 family share: device code, roles, tiles and rules."""
