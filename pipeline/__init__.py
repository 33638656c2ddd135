"""What a user calls: public API, CLI, configs, the step graph's driver, the run loop, journal and reports.

May import every room.
"""
