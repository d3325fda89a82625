"""Comparison of runs: statistics, a page, pictures, a W&B report."""
