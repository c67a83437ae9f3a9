"""All families of programs, one module per kind. Importing this package registers them."""

from mtmc_lsp.programs.families import (
    attention,
    blocks,
    convolutions,
    elementwise,
    geometry,
    indexing,
    losses,
    networks,
    norms,
    pair_losses,
    products,
    reductions,
    training,
    transformers,
)

__all__ = [
    "attention",
    "blocks",
    "convolutions",
    "elementwise",
    "geometry",
    "indexing",
    "losses",
    "networks",
    "norms",
    "pair_losses",
    "products",
    "reductions",
    "training",
    "transformers",
]
