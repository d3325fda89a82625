"""The weights that a run has reached, as a model's folder: what a bench is to look at instead of where runs begin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from trimtab.errors import ConfigError
from trimtab.policy import load as policies
from trimtab.spec import PolicySpec
from trimtab.train import checkpoint


@contextmanager
def trained(folder: Path, spec: PolicySpec, run: Path | None) -> Iterator[Path]:
    """``folder`` itself, or with ``run`` a temporary one with the weights of that run's newest whole checkpoint.

    ``run``: a run's folder, or one of its checkpoints. Raises ConfigError where there is none, CheckpointError where it
    is damaged, ModelError where its weights are not of this model.
    """
    if run is None:
        yield folder
        return
    one = (run / "manifest.json").exists()
    snapshot = checkpoint.load(run) if one else checkpoint.load_last(run / "checkpoints")
    if snapshot is None:
        raise ConfigError(
            f"--weights={run} holds no checkpoint; allowed: a run's folder with checkpoints/ (checkpoint.every), or "
            "one of them; without --weights the model that runs begin with is looked at"
        )
    policy = policies.load(folder, spec)
    policy.load_state(snapshot.model)
    with TemporaryDirectory(prefix="trimtab-") as place:
        policy.save_pretrained(Path(place))
        yield Path(place)
