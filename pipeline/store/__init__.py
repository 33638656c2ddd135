"""What a run keeps on disk: the run folder and its lock, the journal, the checkpoints.

Trajectories of committed batches (`libra.resources.batches`) and published weights (`libra.resources.weights`) are
written by their own modules, because tasks read them. Nothing here decides what to write or when; the driver does.
"""
