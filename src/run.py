"""``python -m run [overrides]``: one run, or with ``-m`` a sweep. ``python -m run --help`` explains both."""

from __future__ import annotations

import os
import sys

import hydra
from omegaconf import DictConfig

from trimtab import config
from trimtab.errors import ConfigError, Preempted, TrimtabError

FULL = os.environ.get("HYDRA_FULL_ERROR") == "1"  # the user wants tracebacks
FAILED, REFUSED, PREEMPTED = 1, 2, 75  # 75 is EX_TEMPFAIL: run it again


def job(composed: DictConfig) -> float | None:
    """One run: rules first, torch only when they hold; returns the objective for optimising sweepers."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads slow a busy machine tenfold
    try:
        config.refuse_launcher(composed)
        spec = config.with_run_dir(config.prepare(composed, config.job_overrides()))
        for line in config.notes(config.to_spec(composed), spec, config.job_overrides()):
            print(f"note: {line}", file=sys.stderr)
        from trimtab import experiment

        return experiment.run(spec, config.job_overrides())
    except Preempted as stop:
        raise SystemExit(PREEMPTED) from stop
    except TrimtabError as error:
        if FULL or config.in_sweep():
            raise  # the sweep's other runs go on; main reports the first failure in the end
        raise SystemExit(report(error)) from error


def report(error: Exception) -> int:
    """Print an error in lines that say what is allowed; the exit code it means."""
    text = str(error) if isinstance(error, TrimtabError) else config.explain(error, *config.typed_overrides())
    print("\n".join(f"error: {line}" for line in text.splitlines()), file=sys.stderr)
    return FAILED if isinstance(error, TrimtabError) and not isinstance(error, ConfigError) else REFUSED


def main() -> None:
    """Run Hydra; what it refuses becomes an explanation, what breaks inside a run keeps its traceback."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        return print(config.help_text())
    config.register()
    sys.argv[1:] = config.spelled(sys.argv[1:])
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, instead of printing in its own way
    try:
        hydra.main(version_base="1.3", config_path=str(config.CONF), config_name="config")(job)()
    except (*config.COMPOSE_ERRORS, TrimtabError) as error:
        if FULL or (config.raised_in(job, error) and not isinstance(error, TrimtabError)):
            raise
        sys.exit(report(error))


if __name__ == "__main__":
    main()
