"""Decisions, made inside the Dask scheduler: the plugin, roles and tags, late binding, bucket policies.

Policies are pure state machines: no I/O, no tasks, no clock of their own. May import ``resources`` and ``native``;
never ``tasks``, ``pipeline`` or torch.
"""
