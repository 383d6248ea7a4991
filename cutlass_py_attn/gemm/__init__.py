"""The five rooms: the products that attention's forward and backward are made of.

    room       equation        rows x columns, summed        A                 B
    matmul_qk  S   = Q K^T     tile_m x tile_n, head_dim     Q  (m, k)         K  (n, k)
    doivj      dP  = dO V^T    tile_m x tile_n, head_dim_v   dO (m, k)         V  (n, k)
    grad_v     dV += P^T dO    tile_n x head_dim_v, tile_m   P  (k, m) as P^T  dO (k, n)
    grad_k     dK += dS^T Q    tile_n x head_dim, tile_m     dS (k, m) as dS^T Q  (k, n)
    grad_q     dQ  = dS K      tile_m x head_dim, tile_n     dS (m, k)         K  (k, n)

The forward's O += P V is grad_q's form with (P, V) for (dS, K).

Words: tile_m query rows of a tile, tile_n key rows, columns a padded head dim, warps (rows, columns) of
warps over a product, stage one slot of a ring in shared memory, room one of the five products.
"""

ROOMS = ("matmul_qk", "doivj", "grad_v", "grad_k", "grad_q")
