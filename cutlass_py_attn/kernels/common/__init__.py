"""Device code that the kernels share: parameters, tile copies, MMA loops, masks, softmax, score terms, dropout."""
