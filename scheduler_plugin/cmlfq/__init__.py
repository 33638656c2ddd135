"""C-MLFQ: which bucket a continuation belongs in, from the tool returns that caused it.

A prefix tree over tool states predicts what is left of a trajectory (`tree`, `estimate`), a router binds it with
damping (`router`) if the move pays (`cost`), and `policy` fits both to the seam of bucket policies. Pure: only
`persistence` touches files, and only when called.
"""
