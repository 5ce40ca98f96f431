"""Development tools for the GPU kernels."""
