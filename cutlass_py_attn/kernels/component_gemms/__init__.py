"""The five component GEMMs: the products that attention's forward and backward are made of.

    name       equation      C                        k           A                            B
    matmul_qk  S = Q K^T     (tile_m, tile_n)         head_dim    Q (m, k)                     K (n, k)
    doivj      dP = dO V^T   (tile_m, tile_n)         head_dim_v  dO (m, k)                    V (n, k)
    grad_v     dV += P^T dO  (tile_n, head_dim_v)     tile_m      P (k, m), or P^T registers   dO (k, n)
    grad_k     dK += dS^T Q  (tile_n, head_dim)       tile_m      dS (k, m), or dS^T registers Q (k, n)
    grad_q     dQ = dS K     (tile_m, head_dim)       tile_n      dS (m, k)                    K (k, n)

With swap A/B matmul_qk computes S^T = K Q^T and doivj dP^T = V dO^T. The forward's O += P V is grad_q's form with
(P, V) in place of (dS, K). The kernels name the GEMMs by their operands: mma_qk, mma_dov, mma_pdo, mma_dsq, mma_dsk.

Names: tile_m is the query rows of a tile, tile_n its key rows, `columns` a padded head dim, `warps` the (rows, columns)
of warps over C, and a stage is one tile of a pipeline's ring in shared memory.
"""

COMPONENT_GEMMS = ("matmul_qk", "doivj", "grad_v", "grad_k", "grad_q")
