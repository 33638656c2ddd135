"""Simulated runs: workloads, policies compared, scenarios, reports, and the published experiments.

Invariant: every figure that leaves this package says where it comes from: *derived*, *tuned* or *not reproduced*
against a published one, *simulated* otherwise.
"""
