"""Problems from Hugging Face datasets: a saved folder, local data files, or a hub name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

from trimtab.errors import ConfigError, DataError
from trimtab.spec import TaskSpec
from trimtab.task.records import Record, RecordTask

try:
    import datasets
    from datasets.exceptions import DatasetsError
except ImportError as error:
    raise ConfigError("task=hf needs the package: pip install datasets") from error

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def hf_task(spec: TaskSpec) -> RecordTask:
    """The task of ``task.path``, ``subset`` and ``split`` (and ``eval_split``, else the last ``eval_size`` rows)."""
    if spec.path is None:
        raise ConfigError("task=hf needs a dataset: task.path=FOLDER, a data file, or a hub name")
    evaluation = None
    if spec.eval_split is not None:
        evaluation = rows(load(spec.path, spec.subset, spec.eval_split, "eval_split"), spec, spec.eval_split)
    return RecordTask(spec, rows(load(spec.path, spec.subset, spec.split, "split"), spec, spec.split), evaluation)


def rows(dataset: Any, spec: TaskSpec, split: str) -> Iterator[Record]:
    """(``path[split]:row``, fields) of each row; only the two fields in use are read."""
    keep = [k for k in (spec.prompt_key, spec.answer_key) if k in dataset.column_names]
    if len(set(keep)) < len({spec.prompt_key, spec.answer_key}):
        missing = spec.prompt_key if spec.prompt_key not in keep else spec.answer_key
        option = "prompt_key" if spec.prompt_key not in keep else "answer_key"
        raise DataError(
            f"task.path={spec.path}: no column {missing!r} in split {split!r}; columns: "
            f"{', '.join(dataset.column_names)}. Set task.{option}"
        )
    name = Path(str(spec.path)).name
    for number, row in enumerate(dataset.select_columns(keep)):
        yield f"{name}[{split}]:{number}", row


def load(path: str, subset: str | None, split: str, option: str) -> Any:
    """One split of a dataset. Raises ConfigError when it cannot be had, listing the splits if those are known."""
    local = Path(path).expanduser()
    try:
        if (local / "dataset_dict.json").is_file() or (local / "state.json").is_file():
            return pick(datasets.load_from_disk(str(local)), path, split, option)
        if local.is_file():
            if local.suffix not in FORMATS:
                raise ConfigError(f"task.path={path}: known kinds of file are {', '.join(FORMATS)}")
            found = datasets.load_dataset(FORMATS[local.suffix], data_files=str(local))
            return pick(found, path, split, option)
        return pick(datasets.load_dataset(str(local) if local.is_dir() else path, subset), path, split, option)
    except (DatasetsError, OSError, ValueError) as error:
        raise ConfigError(
            f"task.path={path} (task.subset={subset}) cannot be loaded: {error}. Allowed: a folder written by "
            f"save_to_disk, a data file ({', '.join(FORMATS)}), a folder of such files, or a hub name"
        ) from error


def pick(found: Any, path: str, split: str, option: str) -> Any:
    """The split of a DatasetDict; a folder with a single Dataset is its own ``train`` split."""
    splits = found if isinstance(found, datasets.DatasetDict) else {"train": found}
    if split not in splits:
        raise ConfigError(f"task.{option}={split}: {path} has the splits {', '.join(map(str, splits))}")
    return splits[split]
