"""Text from a checkpoint of Hugging Face, or from random weights, with its speed.

PYTHONPATH=examples python -m generate --help
"""
