"""The tables of ``python -m run --help``, made from ``trimtab.spec`` and the folders of conf/."""

from __future__ import annotations

from itertools import groupby
from textwrap import wrap
from typing import Sequence

from trimtab.config.groups import choices, defaults, group_names
from trimtab.config.keys import Option, all_options, written

SWEEP_KEYS = ("wait", "dry_run", "runs_per_job", "launch.at_once", "launch.fail_fast", "launch.resources",
              "launch.signal_lead", "launch.packing")  # fmt: skip
KEYS = (
    "seed", "steps", "run_dir", "resume", "shadow", "algo.metrics_only",
    "mis.tis_mode", "mis.tis_level", "mis.tis_lower_bound", "mis.tis_upper_bound", "mis.tis_batch_normalize",
    "mis.use_rs", "mis.rs_level", "mis.rs_lower_bound", "mis.rs_upper_bound", "mis.rs_veto_threshold",
    "mis.reject", "mis.m2_threshold",
    "loss.name", "loss.ratio_level", "loss.clip_low", "loss.clip_high", "loss.aggregate", "loss.denominator",
    "loss.reject_terms", "loss.kl_coef",
    "rollout.batch_size", "rollout.group_size", "rollout.max_tokens", "rollout.temperature", "rollout.dtype",
    "policy.path", "policy.dtype", "policy.device", "task.difficulty", "task.path",
    "optim.lr", "optim.epochs", "optim.minibatches", "evaluation.every", "checkpoint.every",
)  # fmt: skip


TEXT = """\
trimtab trains a language model with GRPO and corrects the gap between the policy that sampled
(the rollout engine) and the policy that is trained.

python -m run [GROUP=CHOICE | KEY=VALUE]...      one run
python -m run -m GROUP=A,B seed=0,1,2            a sweep: every combination

Groups (* is the default; a comment in conf/GROUP/CHOICE.yaml says what a choice does)
{groups}

Keys used most (all of them with their values: python -m run --cfg job)
{keys}

Examples
  python -m run                                            the default: tiny model, vLLM, token weights
  python -m run algo=decoupled level=geometric rs=geometric veto=at_1e-4 seed=1
  python -m run preset=miles/default mis.tis_upper_bound=3
  python -m run 'mis.reject=[{{statistic:k3,level:sequence,over_tokens:mean,upper:0.01}}]'
  python -m run algo=reinforce 'shadow=[verl/bypass_pg_is,prime_rl/dppo]'
  python -m run policy=smollm2 rollout=transformers rollout.batch_size=32 steps=50
  python -m run debug=smoke algo=bypass run_dir=/tmp/try   two small steps: does it run?
  python -m run sweep=levels                               a study of sweeps/
  python -m run -m launcher=slurm launch.clusters.slurm.partition=gpu algo=standard,bypass seed=0,1,2
  python -m run sweep=optuna_bounds launcher=slurm wait=true

Sweeps: launcher=local starts processes here, launcher=slurm and slurm_fleet submit and return. The same command again
goes on: it starts only what is missing or failed. trimtab sweep status|watch|logs|cancel|resume|collect [SWEEP]
{sweep_keys}
  launch.clusters.NAME.KEY  launch.classes.NAME.KEY  launch.rules  launch.retries.CAUSE: see docs/options.md

Files, in run_dir (default runs/<time>_<algo>_<hash>; in a sweep multirun/<name>_<hash>/<algo>_<hash>_s<seed>)
  config.yaml overrides.yaml   what ran, resolved, and what was typed
  metrics.jsonl summary.json   one object a step; the end
  status.json                  running | completed | failed | preempted, and the error
  rollouts/ checkpoints/       Parquet every rollout.record_every steps; resume=auto continues

Exit code: 0 done, 1 failed, 2 refused (a wrong config), 75 preempted (resume=auto goes on).
Flags: -m (sweep), --cfg job (print the config), --info defaults-tree (where values come from), --hydra-help
"""


def text() -> str:
    """What ``python -m run --help`` prints; Hydra's own help takes a second longer to list the groups."""
    return TEXT.format(groups=groups_table(), keys=keys_table(), sweep_keys=keys_table(SWEEP_KEYS))


def groups_table() -> str:
    """One line a group: its name and choices, a star at the default."""
    chosen, lines = defaults(), []
    for group in sorted(group_names(), key=lambda g: list(chosen).index(g)):
        names = [f"{name}*" if name == chosen[group] else name for name in choices(group)]
        families = groupby(names, key=lambda name: name.rpartition("/")[0])
        rows = [row for _, family in families for row in wrap(" ".join(family), 105, break_on_hyphens=False)]
        lines += [f"  {group if i == 0 else '':10} {row}" for i, row in enumerate(rows)]
    return "\n".join(lines)


def keys_table(keys: Sequence[str] = KEYS) -> str:
    """One line a key: name, default, help and what an enum takes."""
    return "\n".join(_line(all_options()[key]) for key in keys)


def _line(option: Option) -> str:
    default = "-" if option.default in (None, "") else written(option.default)
    takes = f" ({' | '.join(option.choices)})" if option.choices else ""
    return f"  {option.key:25} {default:11} {option.help}{takes}"
