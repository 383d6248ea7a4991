"""Forward and backward on mma.sync and cp.async, for sm_80 and later."""
