"""What an operation is to the rest of the package: a declaration, in its own folder."""

import importlib
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import jax
from jax.ad_checkpoint import checkpoint_name

Implementation = Literal["reference", "custom_call", "pallas"]


@dataclass(frozen=True, repr=False)
class Operation:
    """An operation: which implementations it has, and what runs where there is no kernel."""

    # The name of its function.
    name: str
    # The target of which there is a handler on every platform that has kernels; None where no
    # platform has any.
    target: str | None
    # Those that may be asked for by name.
    implementations: tuple[Implementation, ...] = ("reference", "custom_call")
    # Whether XLA's own program runs on platforms without kernels. Not on CPUs, for which every
    # library has kernels: without a library an error says so.
    falls_back: bool = False
    # Its variants in the library's table of measured choices (`library.prefers_xla`).
    variants: tuple[str, ...] = ("",)
    # What `info()` adds on platforms where some calls have kernels and others XLA's program.
    notes: tuple[tuple[str, str], ...] = ()
    # What `info()` says of platforms that no library has kernels for, where that is not XLA's own
    # program alone.
    without: tuple[tuple[str, str], ...] = ()

    def exports(self) -> Any:
        """Returns its entry of `exported.EXPORTS`, or `EXPORTS` of its `api`.

        They are loaded late: tools alone want them.
        """
        if entry := importlib.import_module(f"{__package__}.exported").EXPORTS.get(self.name):
            return entry
        return importlib.import_module(f"{__package__}.{self.name}.api").EXPORTS

    def named(self, result: jax.Array) -> jax.Array:
        """Returns a result under the operation's name, which policies of `jax.checkpoint` go by.

        It is for derivative rules: what they keep for the backward pass has to have the name.
        """
        found: jax.Array = checkpoint_name(result, self.name)
        return found

    def __repr__(self) -> str:
        """Its name."""
        return self.name

    def refuse_derivative(self) -> NoReturn:
        """Refuses derivatives of what a kernel gives as a derivative.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{self}: second derivatives (grad of grad, hessian, jvp of grad) have no kernel; "
            'implementation="reference" has them'
        )
