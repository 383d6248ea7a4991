"""sm90 forward over a cache of e4m3 codes."""
