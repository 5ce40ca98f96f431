"""Layers of the NVIDIA path: packed weights, fused kernels, no host work between the first launch and the last."""
