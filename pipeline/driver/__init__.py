"""The step graph's driver: micro-batched submission to Dask, results as futures of the event loop."""
