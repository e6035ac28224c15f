#!/usr/bin/env bash
# The rest of the products of which every run has a fixed part: maps of every subset of operands, meshes with
# JAX's cache on disk and by GSPMD, and each of JAX's strict modes with every dtype and option.
source scripts/tiers/common.sh
source scripts/jax_environment.sh

unset XENTILE_XLA_LIBRARY # what is installed is under test
use_jax_environment .venv-jax/0.12.0 0.12.0
install_pallas_bridge
export XENTILE_TEST_NIGHTLY=1
exec scripts/pytest_in_shares.sh pallas_bridge/tests -m nightly
