"""``trimtab parity``: a ladder of controlled comparisons that finds why engine and trainer disagree, and where."""
