"""Where Hydra looks for plugins, and nowhere else: its scan finds trimtab's sweeper and launcher here."""

from trimtab.launch.plugin import TrimtabLauncher, TrimtabSweeper

__all__ = ["TrimtabLauncher", "TrimtabSweeper"]
