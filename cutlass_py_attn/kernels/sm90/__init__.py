"""Warp-specialised forward and backward on wgmma and TMA, for sm_90a."""
