"""What a config points at: files, folders and modules, looked up without importing or reading anything."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

LOCAL = (".", "/", "~")  # no name on a hub starts like that


def is_file(path: str) -> bool:
    """Whether there is such a file; a leading ~ is the home folder."""
    return os.path.isfile(os.path.expanduser(path))


def is_model(path: str) -> bool:
    """Whether ``path`` is a folder, or could be a model's name on the hub (one slash at most)."""
    place = os.path.expanduser(path)
    could_be_a_name = not path.startswith(LOCAL) and path.count("/") <= 1 and not os.path.exists(place)
    return could_be_a_name or os.path.isdir(place)


def is_data(path: str) -> bool:
    """Whether ``path`` is there, or could be a dataset's name on the hub."""
    return not path.startswith(LOCAL) or os.path.exists(os.path.expanduser(path))


def is_importable(path: str) -> bool:
    """Whether the first part of ``package.module:name`` is installed, or lies in the current folder."""
    top = path.partition(":")[0].partition(".")[0]
    if top in sys.modules or PathFinder.find_spec(top, [os.getcwd()]) is not None:
        return True
    return importlib.util.find_spec(top) is not None
