"""tierstep: AdamW for PyTorch models whose optimizer state fits neither on the GPU nor in host RAM."""
