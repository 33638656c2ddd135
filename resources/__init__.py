"""What the cluster has and what it costs, and the vocabulary that all rooms share.

``types/``, ``errors``, ``tags``, ``keys`` and ``wire`` need the standard library and numpy only. Launchers, the weight
store and the trajectory format live here too. May import ``native``; never ``tasks``, ``pipeline`` or
``scheduler_plugin``.
"""
