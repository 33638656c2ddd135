"""Bodies of the tasks, run inside Dask workers: rollout, tool, reward, train, publish; the worker plugin and roles.

Engines, trainers, algorithms and environments are seams: one base, one file a kind. Engines and training ranks are
child processes; the worker itself imports no torch. May import ``resources`` and ``native``; never
``scheduler_plugin`` or ``pipeline``.
"""
