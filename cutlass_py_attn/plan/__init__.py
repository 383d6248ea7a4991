"""Planning: every number of a launch is decided before anything is compiled."""
