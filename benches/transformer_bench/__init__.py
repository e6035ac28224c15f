"""A transformer taken apart: what each part of a step costs, and what fits in memory.

    PYTHONPATH=benches:examples python -m transformer_bench --help

Read in this order: config.py (what is measured), runner.py (a process for each cell), model.py,
then a module for each command.
"""
