"""Functions with the signatures of `jax.nn` and Flax, over the operations of the package."""
