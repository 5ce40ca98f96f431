"""Measurements behind ``deepinfer bench``."""
