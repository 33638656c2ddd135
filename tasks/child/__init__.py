"""The child-process protocol: typed messages between a Dask worker and its engines and training ranks."""
