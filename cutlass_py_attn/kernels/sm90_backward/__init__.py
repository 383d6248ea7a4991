"""Warp-specialised backward on wgmma and TMA, for sm_90a."""
