"""Forward of few queries with the keys split over thread blocks (split-KV), and its combine kernel."""
