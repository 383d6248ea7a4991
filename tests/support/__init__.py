"""What several tests share: the fake driver, emulators, toy kernels, expected refusals."""
