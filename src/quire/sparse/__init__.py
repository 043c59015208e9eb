"""HiSparse: latents in host memory, and on the device a hot buffer per request and layer of those that are read."""
