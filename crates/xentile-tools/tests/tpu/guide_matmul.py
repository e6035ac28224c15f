"""Compiles the matrix products of JAX's Pallas guide for a TPU v5e, of which the guide lists times.

    python guide_matmul.py FOLDER

Writes libtpu's schedule of each to FOLDER/<variant>_<block>_<size>: a bf16 product of square
matrices by a grid of blocks (https://docs.jax.dev/en/latest/pallas/tpu/matmul.html). `rhs` has the
second operand transposed, `relu` an activation behind the product. The estimates of xentile-tools
are held against the guide's times.
"""

import os
import sys
from functools import partial
from pathlib import Path

FOLDER = Path(sys.argv[1])
DUMPS = FOLDER / "dumps"
# libtpu reads these as it is loaded.
os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={DUMPS} --xla_jf_dump_llo_text=true"
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

# Rows, inner extent and columns of a block.
BLOCKS = {128: (128, 128, 128), 512: (512, 1024, 1024)}
SIZES = (1024, 4096, 8192)


def kernel(variant: str, x, y, product, total) -> None:  # noqa: ANN001 (references)
    """Adds the product of two blocks to `total`, and writes that after the last of them."""
    block = pl.program_id(2)

    @pl.when(block == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    contracted = ((1,), (1 if variant == "rhs" else 0,))
    total[...] += jax.lax.dot_general(
        x[...], y[...], (contracted, ((), ())), preferred_element_type=jnp.float32
    )

    @pl.when(block == pl.num_programs(2) - 1)
    def _() -> None:
        found = jax.nn.relu(total[...]) if variant == "relu" else total[...]
        product[...] = found.astype(product.dtype)


def matmul(variant: str, block: int, x: jax.Array, y: jax.Array) -> jax.Array:
    """The product of x [N, N] and y [N, N], which `rhs` takes transposed."""
    size = x.shape[0]
    rows, inner, columns = BLOCKS[block]
    y_spec = pl.BlockSpec((inner, columns), lambda row, column, step: (step, column))
    if variant == "rhs":
        y_spec = pl.BlockSpec((columns, inner), lambda row, column, step: (column, step))
    return pl.pallas_call(
        partial(kernel, variant),
        grid=(size // rows, size // columns, size // inner),
        in_specs=[pl.BlockSpec((rows, inner), lambda row, column, step: (row, step)), y_spec],
        out_specs=pl.BlockSpec((rows, columns), lambda row, column, step: (row, column)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        name="guide_matmul",
    )(x, y)


def main() -> None:
    """Compiles every product, and keeps the schedule of each apart."""
    device = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]
    for variant in ("plain", "rhs", "relu"):
        for block in BLOCKS:
            for size in SIZES:
                matrix = jax.ShapeDtypeStruct(
                    (size, size), jnp.bfloat16, sharding=SingleDeviceSharding(device)
                )
                jax.jit(partial(matmul, variant, block)).lower(matrix, matrix).compile()
                DUMPS.rename(FOLDER / f"{variant}_{block}_{size}")
                DUMPS.mkdir()


if __name__ == "__main__":
    DUMPS.mkdir()
    main()
