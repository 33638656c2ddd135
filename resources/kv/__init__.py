"""KV of trajectories, staged in shared host memory between engines.

`layout` says what a page is and which pages a rank holds, `arena` keeps entries (``segment`` and ``records`` are its
memory), `ownership` ties an arena to its Dask worker's life, `move` copies between a rank's tensors and an arena (`gpu`
does it on a GPU, by jobs of `page_job`), `pinned` registers memory for the GPU. Nothing here imports torch or CUDA when
it is imported.
"""
