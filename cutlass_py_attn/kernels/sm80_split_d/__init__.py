"""Forward and backward with the head dimension split over thread blocks, for head dims too large for one block."""
