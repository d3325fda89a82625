"""trimtab: a bench for rollout correction in LLM reinforcement learning."""

__version__ = "0.1.0"
