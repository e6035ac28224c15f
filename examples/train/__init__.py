"""A decoder-only transformer in flax.nnx, trained with the kernels of pallas_bridge or without.

    PYTHONPATH=examples python -m train --help

Read in this order: config.py (what a run is), model.py, losses.py, data.py, loop.py.
"""
