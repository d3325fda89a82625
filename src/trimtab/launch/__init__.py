"""Sweeps: which runs there are, where they were sent, what became of them. JSON on disk is the only memory."""
