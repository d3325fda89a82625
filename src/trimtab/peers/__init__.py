"""What other systems log about a batch: their metrics under their own names, by their own definitions.

So that someone who comes from one of them can lay dashboards side by side. Pure functions of flat tokens; where a
definition differs from trimtab's own (docs/metrics.md), the system's is followed, to its small constants.
"""
