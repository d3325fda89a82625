"""The mismatch laboratory: how far engine and trainer are apart on the same tokens, and why."""
