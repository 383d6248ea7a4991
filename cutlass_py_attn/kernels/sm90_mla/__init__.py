"""The MLA decode kernel on wgmma and TMA (sm_90a): keys that contain the values."""
