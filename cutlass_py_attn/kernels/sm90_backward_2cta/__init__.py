"""sm90 backward whose pairs of thread blocks share key tiles."""
