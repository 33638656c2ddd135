"""``libra profile``: what an engine and a trainer really take, measured in their own processes, as a profile file.

Invariants: what is measured is the process that a run uses, spoken to as a worker speaks to it, so any kind of engine
or trainer is measured in the same way; every figure is a median; errors are told on points that the fit did not see.
"""
