"""Warp-specialised forward on wgmma and TMA, for sm_90a."""
