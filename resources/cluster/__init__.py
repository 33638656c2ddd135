"""Clusters: launching a local one, attaching to a running one."""
