"""What a person sees of a run: events in, live display, metrics and summary files out.

The run loop describes what happens as `events`; everything here only reads them. A view never fails a run.
"""
