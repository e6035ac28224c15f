"""Checkpoints by orbax: parameters, optimizer state and step, with the model's dimensions."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from .config import Config, InputError, RunError

KEPT = 2


class Checkpoints:
    """A folder of checkpoints, the newest `KEPT` of them, each a folder named by its step.

    orbax writes to a temporary folder and renames it, so that a write which fails leaves the
    checkpoints before it as they were.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        """Takes a folder, which need not be there yet, and the run's configuration."""
        self.folder, self.config = folder.absolute(), config
        self.options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, enable_async_checkpointing=False, create=True
        )

    def save(self, step: int, state: Any) -> None:
        """Writes a checkpoint, unless there is one of that step.

        Raises:
            RunError: The disk is full, or the folder cannot be written.
        """
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                raise RunError(
                    f"checkpoint in {self.folder} takes {needed} bytes of the {free} that are "
                    "free: free space, or name another --checkpoint_dir"
                )
            with ocp.CheckpointManager(self.folder, options=self.options) as manager:
                if step in manager.all_steps():
                    return
                manager.save(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardSave(state),
                        config=ocp.args.JsonSave({"model": self.config.shape()}),
                    ),
                )
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            # tensorstore's errors are ValueErrors.
            reason = str(error).splitlines()[0]
            raise RunError(
                f"checkpoint in {self.folder} cannot be written ({reason}): free space, or name "
                "another --checkpoint_dir; those before it are whole"
            ) from error

    def restore(self, abstract: Any) -> tuple[int, Any]:
        """The newest checkpoint.

        Args:
            abstract: The state's shapes, dtypes and shardings, of the mesh of this run.

        Returns:
            Its step, and the state.

        Raises:
            InputError: There is none, or it is of another model.
        """
        if not self.folder.is_dir():
            raise InputError(f"--resume {self.folder} is no folder: name one with checkpoints")
        with ocp.CheckpointManager(self.folder, options=self.options) as manager:
            step = manager.latest_step()
            if step is None:
                raise InputError(
                    f"--resume {self.folder} has no checkpoint: name a folder that has"
                )
            # Before its arrays, of which orbax would cut or pad those of another shape.
            saved = {"packed": True, **self.saved_model(step)}
            for name, value in self.config.shape().items():
                if saved.get(name) != value:
                    raise InputError(
                        f"checkpoint {self.folder / str(step)} has {name} {saved.get(name)} and "
                        f"the run {value}: resume with the options it was made with"
                    )
            restored = manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            )
        return step, restored["state"]

    def saved_model(self, step: int) -> dict[str, Any]:
        """The dimensions that a checkpoint was made with."""
        file = self.folder / str(step) / "config" / "metadata"
        try:
            model: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["model"]
        except (OSError, ValueError, KeyError):
            raise InputError(
                f"checkpoint {self.folder / str(step)} is not whole or not of this program: "
                "remove it, or name another folder"
            ) from None
        return model
