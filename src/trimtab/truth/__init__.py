"""Exact gradients by enumeration: what each method's gradient is on average, how far off, and how noisy.

Nothing here imports torch until a problem is enumerated (``enumerate``, ``measure``).
"""
