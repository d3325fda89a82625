"""Error types: each message says what was given, what is allowed, and which override mends it."""

from __future__ import annotations


class TrimtabError(Exception):
    """Base of every error that trimtab raises on purpose; shown to users without a traceback."""


class ConfigError(TrimtabError):
    """A configuration that cannot run; raised before torch is imported."""


class DataError(TrimtabError):
    """Input data (rollouts, prompts, log-probs) that breaks the contract; the message names the sample."""


class EngineError(TrimtabError):
    """A rollout engine that is missing, refuses to start, or no longer samples from the policy it was given."""


class ModelError(TrimtabError):
    """A model folder that cannot be read or does not hold a causal language model."""


class CheckpointError(TrimtabError):
    """A checkpoint that is missing, damaged, or was written by another configuration."""


class NonFiniteError(TrimtabError):
    """Training stopped because too many steps in a row gave a non-finite loss or gradient."""


class Preempted(Exception):
    """The run was asked to stop (SIGTERM, SIGUSR2) and has saved a checkpoint; not a failure."""
