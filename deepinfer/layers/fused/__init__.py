"""Layers of the NVIDIA path: packed weights, fused kernels, nothing on the host between the first launch and the last."""
