"""The commands of the CLI, one module each, imported when run.

Each has one function that does the work and returns or raises; what the user may type is defined in `cli`.
"""
